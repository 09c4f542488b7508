"""Killed between a channel's success and the note of it: the message is sent again under its key, and told once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from alert_messages import NEW
from alertmanager_service import Alertmanager
from gitlab_api import GitLab, gitlab_sink
from http_sink import HttpSink, Reply
from mail_sink import MailSink
from services import ROOT

pytestmark = pytest.mark.servers


def send(folder: Path, channels: str, *words: str) -> subprocess.CompletedProcess[str]:
    config = folder / "alerts.yaml"
    config.write_text(f"channels:\n{channels}", encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(ROOT / "tests/send_and_die.py"), str(folder / "state"), str(config), *words],
        env={**os.environ, "GITLAB_TOKEN": GitLab().token}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=1200, check=False,
    )  # fmt: skip


def killed_then_sent(folder: Path, channels: str) -> None:
    """Send it with a kill, then again, and once more when nothing waits."""
    killed = send(folder, channels, "die")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for _time in range(2):
        again = send(folder, channels)
        assert (again.returncode, again.stderr) == (0, "")


def test_a_webhook_gets_it_again_under_the_same_key(tmp_path: Path) -> None:
    with HttpSink() as sink:
        killed_then_sent(tmp_path, f"  hook: {{type: webhook, url: '{sink.url}'}}\n")

    first, second = sink.requests
    assert first.body == second.body
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"] == NEW.id


def test_gitlab_has_one_issue_without_a_comment(tmp_path: Path) -> None:
    gitlab = GitLab()
    with gitlab_sink(gitlab) as sink:
        killed_then_sent(
            tmp_path,
            f"  issues: {{type: gitlab_issue, url: '{sink.url}', project: 42, token: '${{GITLAB_TOKEN}}'}}\n",
        )

    assert len(gitlab.issues) == 1
    assert gitlab.notes == {1: []}


def test_alertmanager_tells_it_once(tmp_path: Path, alertmanager: Alertmanager) -> None:
    killed_then_sent(tmp_path, f"  alerts: {{type: alertmanager, url: '{alertmanager.url}'}}\n")

    alertmanager.wait_notified(NEW.incident, ["firing"])
    assert len(alertmanager.alerts()) == 1


def test_a_mailbox_gets_it_again_under_the_same_id_and_the_next_one_gets_it_once(tmp_path: Path) -> None:
    with MailSink() as server:
        place = f"host: 127.0.0.1, port: {server.port}, security: none"
        killed_then_sent(
            tmp_path, f"  mail: {{type: smtp, {place}, sender: b@e.org, to: [a@e.org, c@e.org]}}\n"
        )

        assert len(server.of("a@e.org")) == 2
        assert len({mail.id for mail in server.of("a@e.org")}) == 1
        assert len(server.of("c@e.org")) == 1


def test_a_channel_that_is_down_keeps_its_message_and_others_get_theirs(tmp_path: Path) -> None:
    with HttpSink() as up, HttpSink() as down:
        down.then(Reply(503, b"maintenance"))
        channels = f"  down: {{type: webhook, url: '{down.url}'}}\n  up: {{type: webhook, url: '{up.url}'}}\n"
        first = send(tmp_path, channels)
        assert first.returncode == 2
        assert first.stderr == f"down: {down.url}: answered 503: maintenance\n"
        second = send(tmp_path, channels)

    assert (second.returncode, second.stderr) == (0, "")
    assert [len(sink.requests) for sink in (down, up)] == [2, 1]
