"""alerts.yaml: everything that is wrong at once, no secret shown."""

import re
from pathlib import Path

import pytest
import yaml
from alert_messages import NEW, message
from hypothesis import given
from odd_values import changed

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.config import load
from pytest_mlhpc.builtin import channel_types
from pytest_mlhpc.errors import ConfigError, UsageError

HERE = Path(__file__).parent
TYPES = channel_types()
ENVIRON = {"CHAT_URL": "https://chat.example.org/x", "TOKEN": "t0ken"}


def written(folder, text):
    path = folder / "alerts.yaml"
    path.write_text(text)
    return path


def problems(path, environ=None):
    with pytest.raises(ConfigError) as caught:
        load(path, environ or {}, TYPES)
    return [str(problem).replace(f"{path.parent}/", "") for problem in caught.value.problems]


def test_a_good_file_gives_channels_one_for_each_receiver_of_mails():
    config = load(HERE / "good.yaml", ENVIRON, TYPES)
    assert list(config.channels) == ["chat", "mail:b@example.org", "mail:c@example.org"]
    assert config.routes["chat"].kinds == {Kind.STALE, Kind.NODES}
    settings = config.branch, config.report, config.stale_ns, config.rules.recent, config.rules.smallest
    assert settings == ("master", "https://example.org/report", 108_000 * 10**9, 7, 0.02)


def test_a_channel_is_told_of_its_kinds_and_systems_alone():
    assert NEW.kind is Kind.REGRESSION
    assert load(HERE / "good.yaml", ENVIRON, TYPES).takers(NEW) == [
        "mail:b@example.org",
        "mail:c@example.org",
    ]


def test_the_page_of_a_night_goes_to_channels_that_name_it(tmp_path):
    hook = "{type: webhook, url: 'https://x.example.org'"
    text = f"channels:\n  all: {hook}}}\n  lead: {hook}, kinds: [morning]}}\n"
    config = load(written(tmp_path, text), {}, TYPES)
    assert config.takes_mornings
    assert (config.takers(message(kind=Kind.MORNING)), config.takers(NEW)) == (["lead"], ["all"])
    assert not load(HERE / "good.yaml", ENVIRON, TYPES).takes_mornings


@pytest.mark.parametrize(
    ("owners", "takers"),
    [((), ["all"]), (("ada",), ["all", "hers"]), (("bob", "grace"), ["all", "hers"]), (("bob",), ["all"])],
)
@pytest.mark.parametrize("kind", [Kind.REGRESSION, Kind.MORNING])
def test_a_channel_may_be_limited_to_owners(tmp_path, owners, takers, kind):
    hook = f"{{type: webhook, url: 'https://x.example.org', kinds: [{kind}]"
    text = f"channels:\n  all: {hook}}}\n  hers: {hook}, owners: [ada, grace]}}\n"
    config = load(written(tmp_path, text), {}, TYPES)
    assert config.takers(message(kind=kind, owners=owners)) == takers


def test_the_example_of_the_page_is_valid(tmp_path):
    page = (HERE.parents[1] / "docs/alerts.md").read_text(encoding="utf-8")
    config = load(written(tmp_path, page.split("```yaml\n")[-1].split("```")[0]), {}, TYPES)
    assert config.routes["operators:operators@example.org"].owners == {"@hpc/operators"}


def test_no_channels_is_a_file_too(tmp_path):
    assert load(written(tmp_path, "branch: main\n"), {}, TYPES).channels == {}


def test_all_problems_are_told_at_once_with_line_and_nearest_word():
    """Each line of the file says in its comments what is wrong with it."""
    path = HERE / "wrong.yaml"
    found = "\n".join(problems(path))
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for pattern in line.split(" # ")[1:]:
            assert re.search(rf"(?m)^wrong\.yaml:{number}: .*{pattern.strip().removeprefix('^')}", found), (
                found
            )


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
    path = written(tmp_path, f"channels:\n  a: {channel}\n")
    found = problems(path, {"SECRET": "s3cret\nX: s3cret"})
    assert (bool(found), "s3cret" in str(found)) == (True, False)


@pytest.mark.parametrize("text", ["", "[]", "a", "channels: 3", "\tchannels: {}"])
def test_what_is_no_configuration_is_refused(tmp_path, text):
    assert problems(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load(tmp_path / "absent.yaml", {}, TYPES)


def test_a_package_may_bring_a_type_of_its_own(tmp_path):
    assert sorted(TYPES) == ["alertmanager", "apprise", "gitlab_issue", "smtp", "webhook"]
    pager = {"pager": "pytest_mlhpc.alert.channels.webhook"}
    text = "channels:\n  a: {type: pager, url: 'https://example.org'}\n"
    assert list(load(written(tmp_path, text), {}, pager).channels) == ["a"]


GOOD = yaml.safe_load((HERE / "good.yaml").read_text())


@given(changed(GOOD))
def test_any_value_in_any_place_gives_channels_or_a_usage_error(tmp_path, content):
    path = written(tmp_path, yaml.safe_dump(content))
    try:
        config = load(path, ENVIRON, TYPES)
    except UsageError as error:
        assert str(path) in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert config.takers(NEW) is not None
