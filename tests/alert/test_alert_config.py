"""alerts.yaml: everything that is wrong at once, no secret shown."""

import re

import pytest
from alert_messages import NEW

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.config import channel_types, load
from pytest_mlhpc.errors import ConfigError


def written(folder, text):
    path = folder / "alerts.yaml"
    path.write_text(text)
    return path


def problems(folder, text, environ=None):
    with pytest.raises(ConfigError) as caught:
        load(written(folder, text), environ or {})
    return [str(problem).replace(str(folder), "") for problem in caught.value.problems]


ENVIRON = {"CHAT_URL": "https://chat.example.org/x", "TOKEN": "t0ken"}
GOOD = """
branch: master
report: https://example.org/report
stale_after: 30h
rules: {recent: 7, smallest: 0.02}
channels:
  chat: {type: webhook, url: "${CHAT_URL}", token: "${TOKEN}", kinds: [stale, nodes], systems: [cirrus, alps]}
  mail: {type: smtp, host: mail.example.org, sender: a@example.org, to: [b@example.org, c@example.org]}
"""


def test_a_good_file_gives_channels_one_for_each_receiver_of_mails(tmp_path):
    config = load(written(tmp_path, GOOD), ENVIRON)
    assert list(config.channels) == ["chat", "mail:b@example.org", "mail:c@example.org"]
    assert (config.branch, config.report) == ("master", "https://example.org/report")
    assert config.stale_ns == 108_000 * 10**9
    assert (config.rules.recent, config.rules.smallest) == (7, 0.02)
    assert config.routes["chat"].kinds == {Kind.STALE, Kind.NODES}


def test_a_channel_is_told_of_its_kinds_and_systems_alone(tmp_path):
    config = load(written(tmp_path, GOOD), ENVIRON)
    assert NEW.kind is Kind.REGRESSION
    assert config.takers(NEW) == ["mail:b@example.org", "mail:c@example.org"]


def test_no_channels_is_a_file_too(tmp_path):
    assert load(written(tmp_path, "branch: main\n"), {}).channels == {}


def test_all_problems_are_told_at_once_with_line_and_nearest_word(tmp_path):
    text = """
brnch: main
stale_after: soon
rules: {recent: 0, smalest: 1}
channels:
  a: {type: smpt}
  b: {url: "https://example.org"}
  c: {type: webhook, url: "${NOT_SET}", kinds: [regresion]}
  d: {type: webhook, url: "https://example.org", tokn: x}
  e: [1]
  f: {type: smtp, host: mail.example.org, sender: a@b.org, to: c@d.org}
"""
    found = "\n".join(problems(tmp_path, text))
    for expected in (
        r"^/alerts.yaml:2: brnch: unknown key \(did you mean 'branch'\?\)$",
        r"^/alerts.yaml:4: rules.recent: should be a whole number above 0$",
        r"^/alerts.yaml:4: rules.smalest: unknown key \(did you mean 'smallest'\?\)$",
        r"^/alerts.yaml:8: channels.c.url: the variable NOT_SET is not set$",
        r"^/alerts.yaml:11: channels.f.to: should be a list, not 'c@d.org'$",
        r"^/alerts.yaml:9: channels.d.tokn: unknown key \(did you mean 'token'\?\)$",
        r"channels.a.type.*did you mean 'smtp'\?",
        r"channels.b.type: is missing",
        r"channels.c.kinds.*did you mean 'regression'\?",
        r"stale_after.*soon",
        r"channels.e",
    ):
        assert re.search(expected, found, re.MULTILINE), expected


@pytest.mark.parametrize(
    "channel",
    [
        "{type: webhook, url: 'ftp://user:s3cret@example.org/s3cret'}",
        "{type: webhook, url: 's3cret'}",
        "{type: webhook, url: 'https://example.org', token: [s3cret]}",
        "{type: webhook, url: 'https://example.org', token: '${SECRET}'}",
        "{type: gitlab_issue, url: 'https://example.org', project: '', token: 's3cret'}",
        "{type: smtp, host: h, sender: a@b.org, to: [c@d.org], password: {a: s3cret}}",
    ],
)
def test_no_problem_shows_a_secret(tmp_path, channel):
    found = problems(tmp_path, f"channels:\n  a: {channel}\n", {"SECRET": "s3cret\nX: s3cret"})
    assert found
    assert "s3cret" not in "\n".join(found)


@pytest.mark.parametrize("text", ["", "[]", "a", "channels: 3", "\tchannels: {}"])
def test_what_is_no_configuration_is_refused(tmp_path, text):
    assert problems(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load(tmp_path / "absent.yaml", {})


def test_a_package_may_bring_a_type_of_its_own(tmp_path, monkeypatch):
    types = channel_types()
    assert sorted(types) == ["alertmanager", "apprise", "gitlab_issue", "smtp", "webhook"]
    monkeypatch.setattr(
        "pytest_mlhpc.alert.config.channel_types", lambda: {"pager": "pytest_mlhpc.alert.channels.webhook"}
    )
    text = "channels:\n  a: {type: pager, url: 'https://example.org'}\n"
    assert list(load(written(tmp_path, text), {}).channels) == ["a"]
