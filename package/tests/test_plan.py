"""Plans: lifetimes and what each step is asked for, from names alone."""

from kernel_fun._common import plan


def test_a_step_is_told_which_of_its_tensors_are_wanted():
    """bwd.dAv's dAqk is read by fla's bwd.intra; a kernel that stands for both makes it nobody's business."""
    stages = (plan.Stage("bwd.a", ("x",), ("y", "z")), plan.Stage("bwd.b", ("y", "z"), ("out",)))
    seen = []

    def a(*, x, wanted=frozenset({"y", "z"})):
        seen.append(wanted)
        return dict.fromkeys(wanted, x)

    def both(*, y, z):
        return {"out": y + z}

    def one(*, y):
        return {"out": y}

    for b in (both, one):
        steps = [plan.make_step("bwd.a", a, stages, ("out",), "a"), plan.make_step("bwd.b", b, stages, ("out",), "b")]
        made = plan.build(steps, (), (), ("x",), ("out",))
        made.run_backward({"x": 1}, {})
    assert seen == [{"y", "z"}, {"y"}]
