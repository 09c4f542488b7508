"""Every block of the pages for newcomers does what its page says, from nothing, in the order of the page."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cli_calls import mlhpc  # noqa: F401 - a fixture

from pytest_mlhpc.jobs.spec import UNIVERSAL
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE, Verdict

ROOT = Path(__file__).parents[1]
#: Commands that install what is here already, need a cluster, or load the machine for longer than other tests like.
_NOT_RUN = re.compile(r"pip install|--system (?!local)|mlhpc vet|mlhpc screen")
COMMAND = next(one for one in WORKLOADS if one.name == "command")
#: Of all pages together; it may be lowered.
MOST_WORDS = 30_000
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Reader:
    """Somebody who does what a page says, in a folder of their own."""

    def __init__(self, folder):
        self.folder = folder
        for name, module in (("pytest", "pytest"), ("mlhpc", "pytest_mlhpc.cli"), ("python3", "")):
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f'#!/bin/sh\nexec {sys.executable} {f"-m {module}" if module else ""} "$@"\n')
            path.chmod(0o755)
        self.home = folder / "home"
        self.home.mkdir()
        self.output = ""
        kept = {name: value for name, value in os.environ.items() if name not in {"CI", "PYTEST_ADDOPTS"}}
        self.environment = {
            **kept, "PATH": f"{folder}/bin:{os.environ['PATH']}", "MLHPC_STATE": str(folder / "state"), "COLUMNS": "100",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip

    def write(self, text):
        """Write a block of Python to the file that its first line names."""
        name = re.match(r"# (\S+)\n", text)
        path = self.home / name[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, text):
        """Run each command of a block of a console, and find what the page shows of its output."""
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, shown = re.fullmatch(r"([^\n]*\n(?:> [^\n]*\n)*)(.*)", part, re.DOTALL).groups()
            command = re.sub(r"^> ", "", command, flags=re.MULTILINE)
            if _NOT_RUN.search(command):
                continue
            code = re.search(r"# exit code (\d+)", command)
            done = subprocess.run(
                ["/bin/sh", "-c", command], cwd=self.home, env=self.environment, capture_output=True, text=True, check=False
            )  # fmt: skip
            said = done.stdout + done.stderr
            self.output += said
            assert done.returncode == int(code[1] if code else 0), f"{command}\n{said}"
            missing = [line for line in shown.splitlines() if plain(line) not in plain(said)]
            assert [line for line in missing if line.strip() not in {"", "..."}] == [], f"{command}\n{said}"


def plain(text):
    """Return *text* without what differs between runs: numbers, commits, and how wide a column is for them."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE", text)
    text = re.sub(r"\b[0-9a-f]{12}\b", "COMMIT", text)
    return re.sub(r"[\s=_-]+", " ", re.sub(r"[+-]?\d[\d.]*(e[+-]\d+)?", "0", text)).strip()


@pytest.mark.servers
@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/tutorial.md",
        "docs/coming-from.md",
        "docs/against.md",
        "docs/bisect.md",
        "docs/drill.md",
    ],
)
def test_a_page_holds(tmp_path, page):
    follow(Reader(tmp_path), page)


def follow(reader, page):
    """Do what each block of a page says."""
    blocks = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert {"python", "console"} <= {language for language, _ in blocks}
    for language, text in blocks:
        {"python": reader.write, "yaml": reader.write, "console": reader.run}[language](text)


def write_wheel(folder, name, version, files):
    """Write a package that pip installs: its *files* by path."""
    about = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{about}/RECORD": record}.items():
            wheel.writestr(path, text)


@pytest.mark.servers
def test_the_case_holds_and_names_the_release_with_packages_as_fast_as_those_of_the_index(
    tmp_path, monkeypatch
):
    """Releases and figures are those of the page; pip installs stand-ins for the packages from a folder."""
    page = "docs/case.md"
    releases = re.search(r"for release in (.*); do", (ROOT / page).read_text(encoding="utf-8"))[1].split()
    write_wheel(tmp_path, "pyperf", "2.10.0", {"pyperf.py": ""})
    for release in releases:
        milliseconds = 15.7 if release < "4.18" else 20.0
        program = (
            f"import os\nprint(f'Mean +- std dev: {{{milliseconds} + os.getpid() % 7 / 100}} ms +- 0.3 ms')\n"
        )
        files = {"jsonschema/__init__.py": "", "jsonschema/benchmarks/__init__.py": ""}
        write_wheel(tmp_path, "jsonschema", release, {**files, "jsonschema/benchmarks/issue232.py": program})
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    reader = Reader(tmp_path)
    follow(reader, page)
    assert "(Use jsonschema 4.18.0, ada)" in reader.output


def test_the_readme_is_short_and_the_tutorial_reaches_a_verdict_soon():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80
    before = (ROOT / "docs/tutorial.md").read_text().partition("regressed")[0]
    assert len(before.split()) <= 800


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if ":" not in link and not (ROOT / link).exists()] == []


def entries(page):
    """Return what stands before the colon of each entry of a list of a page of docs/, and in the first cells of its tables."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^- .*?:\s|^\| .*? \|", text, re.MULTILINE)


def test_the_reference_names_every_verdict_and_outcome():
    named = {word for entry in entries("reference.md") for word in re.findall(r"`(\w+)`", entry)}
    assert {*Verdict, *FAILURES, *INFRASTRUCTURE} - named == set()


def test_the_page_for_writers_explains_every_field_and_25_at_most():
    text = (ROOT / "docs/writing-benchmarks.md").read_text(encoding="utf-8")
    lists = re.findall(
        r"^## Fields .*?\n\n(.*?)\n\n|^Fields of programs:\n\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL
    )
    heads = [
        line.partition(": ")[0]
        for pair in lists
        for line in "".join(pair).splitlines()
        if line.startswith("- ")
    ]
    explained = {word for head in heads for word in re.findall(r"`(\w+)`", head)}
    assert explained == {*UNIVERSAL, *COMMAND.fields} - {"command", "metrics"}
    assert len(explained) <= 25


def test_the_pages_are_no_more_than_a_reader_can_take_in():
    """Tables and code are included; the lines of a table are no words."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*/*.md")]
    words = [word for page in pages for word in page.read_text(encoding="utf-8").split()]
    assert sum(any(map(str.isalnum, word)) for word in words) <= MOST_WORDS


def test_the_glossary_has_fifteen_nouns():
    assert len(entries("glossary.md")) == 15


# --- ten questions of an operator

#: A question is answered two clicks from the index (the page for operators, the section), within so many lines of its heading.
ANSWER_LINES = 30
OPERATING = ROOT / "docs/operating.md"
INDEX = (ROOT / "docs/index.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^- (?P<question>[^`]*\?) `(?P<command>[^`]*)`: \[[^]]*\]\((?P<link>[^)]*)\)$", re.MULTILINE
)
QUESTIONS = [
    match.groupdict() for match in ROW.finditer(re.sub(r"\n  ", " ", OPERATING.read_text(encoding="utf-8")))
]


def section_of(link, lines=ANSWER_LINES):
    """Return the *lines* that a link of the page for operators shows first."""
    name, _, anchor = link.partition("#")
    page = (ROOT / "docs" / name if name else OPERATING).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(page):
        heading = line.lstrip("#").strip().lower() if line.startswith("#") else ""
        if heading and re.sub(r"[^\w -]", "", heading).replace(" ", "-") == anchor:
            return page[number : number + lines]
    raise AssertionError(f"{link} leads nowhere")


def test_an_operator_has_ten_questions_one_click_from_the_index():
    assert len(QUESTIONS) == 10
    assert "\noperating\n" in INDEX


@pytest.mark.parametrize("row", QUESTIONS, ids=[row["question"] for row in QUESTIONS])
def test_a_question_is_answered_where_the_operator_is_sent(row):
    verbs = re.match(r"mlhpc( [a-z]+)+", row["command"])[0]
    options = re.findall(r"--[a-z-]+", row["command"])
    text = "\n".join(section_of(row["link"]))
    assert [word for word in (verbs, *options) if word not in text] == []


@pytest.mark.parametrize("row", QUESTIONS, ids=[row["question"] for row in QUESTIONS])
def test_the_command_of_an_answer_is_there_with_its_options(row, mlhpc):
    words = re.match(r"mlhpc((?: [a-z]+)+)", row["command"])[1].split()
    explained = mlhpc(*words, "--help").out
    assert [option for option in re.findall(r"--[a-z-]+", row["command"]) if option not in explained] == []


@pytest.mark.parametrize(
    ("link", "words"),
    [
        pytest.param("systems.md#add-your-slurm-system-in-ten-minutes", ["sinfo", "one partition for each kind of node", "accelerator: cuda", "gpu_type"], id="how is a Slurm partition with GPUs added?"),
        pytest.param("reference.md#exit-codes-of-pytest", ["4: nothing was started. The message names what to correct"], id="what does exit code 4 mean, and what now?"),
        pytest.param("commands.md#exit-codes", ["a file, a scheduler or a service failed; correct"], id="... and of mlhpc?"),
        pytest.param("vetting-site.md#drain-reasons", ["[node_problem]", "vetting-checks.md", "mlhpc vet undo node17"], id="a node was drained: why, and how is it undone?"),
        pytest.param("judge.md#baseline-files", ["mlhpc baseline accept TEST --reason", "mlhpc baseline accept ALERT-ID"], id="how is a slower level accepted?"),
        pytest.param("judge.md#how-a-figure-is-judged", ["A loss of 3 % can fail a test"], id="why did a test fail that is only 3 % slower?"),
        pytest.param("alerts.md#alertsyaml", ["each channel whose `kinds`, `systems` and `owners` fit"], id="who gets which message?"),
        pytest.param("operating.md#retention", ["`--older 30d` leaves a month of samples"], id="how is only a month of samples left?"),
        pytest.param("gitlab.md#gitlab-ci-and-github-actions", ["bench.yml", "publish.yml", "system: cirrus"], id="how is it run from GitLab CI?"),
        pytest.param("gitlab.md#gitlab-ci-and-github-actions", ["Build, Pipeline schedules", "MLHPC_COLLECT = yes", "source: local"], id="who starts the nightly pipeline, and what without InfluxDB?"),
        pytest.param("gitlab.md#what-runs-when", ["mlhpc.metric.NAME"], id="where in JUnit's file are figures?"),
        pytest.param("grafana.md#alert-rules", ["/etc/grafana/provisioning/alerting/", "uid `mlhpc`"], id="how does Grafana warn of a slower night?"),
        pytest.param("writing-benchmarks.md#fields-that-every-workload-has", ["`global_batch`", "`learning_rate`", "`seed`"], id="which fields has a training?"),
        pytest.param("reference.md#outcomes", ["more than 16 MiB of output"], id="how much may a program print?"),
        pytest.param("nightly.md#1-install-it", ["mlhpc systems add cirrus", "not on PyPI yet"], id="what stands before the first night?"),
        pytest.param("vetting-checks.md#how-to-read-a-finding", ["[bounds."], id="how is a bound of a check changed?"),
        pytest.param("influxdb.md#how-records-and-events-are-sent", ["the next push sends the week"], id="InfluxDB was away for a week: what now?"),
        pytest.param("slurm.md#queues-of-hours---mlhpc-wait---mlhpc-resume", ["kill -9", "adopts those it wants"], id="a session was killed: what becomes of its jobs?"),
        pytest.param("operating.md#the-store", ["mode 3775", "back this up", "mlhpc_history=influx"], id="where is the state of a team, and what of runners with an empty disk?"),
        pytest.param("operating.md#upgrade", ["CHANGELOG.md", "To go back"], id="how is it upgraded, and back?"),
        pytest.param("alerts.md#maintenance", ["history event add", "MAINT"], id="there is a maintenance on Tuesday: who must be told?"),
        pytest.param("kubernetes.md#rights", ["kubernetes-role.yaml"], id="which rights does it need on Kubernetes?"),
        pytest.param("writing-benchmarks.md#programs-that-you-already-have", ['"MB/s"', "ranks_per_node"], id="how is a program of mine measured?"),
        pytest.param("writing-benchmarks.md#a-program-that-is-built", ["build("], id="how is it built once for all tests?"),
        pytest.param("writing-benchmarks.md#what-the-test-gets", ["run.output", "run.json"], id="how does a test read output and files?"),
        pytest.param("reference.md#verdicts", ["`suspect`", "the next nights decide", "`inconclusive`"], id="is a suspect test a failed one?"),
        pytest.param("against.md#another-revision", ["--mlhpc-against rev="], id="how are two commits compared?"),
        pytest.param("bisect.md#candidates", ["each commit between both nights"], id="which commit made it slower?"),
        pytest.param("coming-from.md#take-over-settings-and-tests", ["--from-reframe"], id="how is a ReFrame suite taken over?"),
        pytest.param("screen.md#what-limits-a-program", ["mlhpc screen -- python train.py"], id="what limits my training?"),
        pytest.param("vetting.md#paste-into-an-sbatch-script", ["--need", "fewer than"], id="is this node fit, and what do exit codes mean?"),
        pytest.param("accelerators.md#the-fields", ["bf16", "`compile`"], id="how is a training compiled, or in bf16?"),
        pytest.param("parallel.md#one-training-on-several-devices", ['{"replicate": 1, "shard": 8}'], id="how is a model sharded?"),
        pytest.param("data.md#cold-and-warm", ['cache="cold"'], id="was the data set read from the disk?"),
        pytest.param("troubleshooting.md#while-it-waits-and-runs", ["import_failed", "python"], id="import_failed: what now?"),
        pytest.param("reliability.md#while-it-runs", ["out_of_memory", "smaller batch"], id="out_of_memory: what now?"),
        pytest.param("security.md#where-secrets-go", ["InfluxDB, GitLab and channels"], id="where do tokens go?"),
        pytest.param("coming-from.md#keep-reframe-and-judge-its-figures-here", ["mlhpc records ingest --reframe perflogs/"], id="how are ReFrame's perflogs taken over?"),
    ],
)  # fmt: skip
def test_a_fresh_operator_finds_the_answer_where_the_heading_promises_it(link, words):
    text = " ".join("\n".join(section_of(link, lines=75)).split())
    assert [one for one in words if one not in text] == []
    assert f"\n{link.partition('.md')[0]}\n" in INDEX  # so it is two clicks from the index
