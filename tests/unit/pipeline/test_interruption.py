"""Stopping an export from outside. Each case is a process of its own: signals belong to a whole process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PREAMBLE = """
import os, signal, sys, threading, time, hashlib
from exporter.contract.errors import BudgetExceeded, Cancelled
from exporter.interruption import Interrupted, Interruption

def say(text):
    os.write(1, (text + "\\n").encode())

def report(error):
    say("reported " + error.code)

interruption = Interruption(lambda: say("cleaned"), report, grace=0.3, last_resort=0.3)
interruption.install()
"""


def run(body: str) -> tuple[list[str], int]:
    """Lines that the process wrote, and its status."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(body)], capture_output=True, timeout=60, check=False
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done.stdout.decode().split("\n")[:-1], done.returncode


def test_sigterm_is_raised_in_the_main_thread() -> None:
    lines, status = run("""
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        except Interrupted as stop:
            say("stopped " + stop.error.code)
        interruption.end()
    """)
    assert (lines, status) == (["stopped cancelled"], 0)


def test_a_handler_of_all_exceptions_does_not_swallow_it() -> None:
    lines, _ = run("""
        try:
            try:
                interruption.request(BudgetExceeded("too much"))
                time.sleep(30)
            except Exception:
                say("swallowed")
        except Interrupted as stop:
            say("stopped " + stop.error.code)
        interruption.end()
    """)
    assert lines == ["stopped budget-exceeded"]


def test_the_first_request_wins_and_none_comes_after_the_end() -> None:
    lines, _ = run("""
        try:
            with interruption.shield():
                interruption.request(BudgetExceeded("too much"))
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
                say("shielded")
            interruption.check()
        except Interrupted as stop:
            say("stopped " + stop.error.code)
        interruption.end()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        say("alive")
    """)
    assert lines == ["shielded", "stopped budget-exceeded", "alive"]


@pytest.mark.parametrize(
    ("stop", "code", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", "cancelled", 143),
        ("interruption.request(BudgetExceeded('too much'))", "budget-exceeded", 1),
    ],
)
def test_a_main_thread_in_a_long_call_is_ended_by_the_watchdog(stop: str, code: str, status: int) -> None:
    lines, found = run(f"""
        def later():
            time.sleep(0.2)
            {stop}
        threading.Thread(target=later).start()
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1)
    """)
    assert (lines, found) == (["cleaned", "reported " + code], status)


def test_a_clean_up_that_hangs_does_not_hold_the_process() -> None:
    lines, status = run("""
        interruption._clean_up = lambda: time.sleep(60)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1)
    """)
    assert (lines, status) == (["reported cancelled"], 143)


def test_a_signal_to_a_forked_worker_is_not_the_parents() -> None:
    lines, _ = run("""
        worker = os.fork()
        if worker == 0:
            time.sleep(30)
        time.sleep(0.1)
        os.kill(worker, signal.SIGTERM)
        _, how = os.waitpid(worker, 0)
        time.sleep(0.1)
        interruption.check()
        say(str(os.WTERMSIG(how)))
        interruption.end()
    """)
    assert lines == ["15"]
