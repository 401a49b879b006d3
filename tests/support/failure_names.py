"""A hook of pytest that prints the name of a test when it fails."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)  # when there is a terminal reporter
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailureNames(terminal))


class _FailureNames:
    """Prints the name of a test when it fails, with one worker or many; pytest names it at the end."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            word = "FAILED" if report.when == "call" else "ERROR"
            self.terminal.write(f"\n{word} {report.nodeid}\n", flush=True, red=True)
