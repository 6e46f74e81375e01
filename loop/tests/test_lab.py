"""`./ladder open NNN` in a real JupyterLab and a real browser: the notebook opens, runs, and shows its verdict."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import loop.tests.notebook_tools  # noqa: F401
from loop import execute, rows, scaffold
from loop.tests import browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.found() is None, reason=f"needs one of {', '.join(browser.NAMES)} on PATH"),
]

CELLS = "[...document.querySelectorAll('.jp-Notebook .jp-CodeCell')]"
TEXT = "document.querySelector('.jp-Notebook').textContent"
MENU = "[...document.querySelectorAll('{} .lm-{}-itemLabel')].find(e => e.textContent === {!r})"


@pytest.fixture
def lab(ladder_root, tmp_path, monkeypatch):
    """The address that `./ladder open 031` gives to the browser, with the server running."""
    monkeypatch.delenv("LOOP_RUN_ID", raising=False)
    scaffold.new("031", "strip", family="cconv", spans=["fwd"])
    told = tmp_path / "told"
    stand_in = tmp_path / "browser"
    stand_in.write_text(f'#!/bin/sh\necho "$1" > "{told}.part" && mv "{told}.part" "{told}"\n')
    stand_in.chmod(0o755)
    places = {f"JUPYTER_{name}_DIR": str(tmp_path / name.lower()) for name in ("CONFIG", "RUNTIME")}
    settings = {"JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "s"), "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "w")}
    environment = {**os.environ, **places, **settings, "BROWSER": str(stand_in), "PYTHONPATH": execute.python_path()}
    log = (tmp_path / "lab.log").open("wb")
    command = [sys.executable, "-m", "loop", "open", "031"]
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not told.exists() and time.monotonic() < deadline and server.poll() is None:
            time.sleep(0.2)
        assert told.exists(), Path(log.name).read_text()
        yield told.read_text().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        log.close()


def test_the_notebook_opens_runs_and_shows_its_verdict(lab, tmp_path):
    with browser.browser() as tab:
        tab.size(1400, 1000)
        tab.open(lab)
        try:
            tab.wait(f"{CELLS}.length >= 5", 60)
            assert tab.evaluate(f"{TEXT}.includes('One idea, from check to verdict')")
            tab.click("document.querySelector('.jp-Notebook .jp-CodeCell .jp-InputPrompt')")  # now the bar is about it
            tab.wait("document.querySelector('#jp-main-statusbar').textContent.includes('| Idle')", 60)
            tab.click(MENU.format(".lm-MenuBar", "MenuBar", "Run"))
            tab.click(MENU.format(".lm-Menu", "Menu", "Run All Cells"))
            tab.wait(f"{TEXT}.includes('031-strip: verdict')", 60)
            assert tab.evaluate("document.querySelectorAll('.jp-RenderedText[data-mime-type*=error]').length") == 0
            assert tab.evaluate(f"{TEXT}.includes('031-strip: verdict') && !{TEXT}.includes('Traceback')")
        finally:
            tab.screenshot(tmp_path / "lab.png")
    mine = [r for r in rows.read() if r.arm == "031"]
    assert {r.status for r in mine} == {"PASSED"}
    assert "000" in {r.baseline for r in mine}
    assert all(r.verdict for r in mine)
