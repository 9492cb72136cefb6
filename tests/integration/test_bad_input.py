"""Whatever is wrong with a model, a setting or a run is said in one line, and leaves nothing."""

import json
import re

import pytest

from tests.integration import bad_input
from tests.integration.session_tools import run_child

ERRORS = {
    "model": "ModelFileError",
    "setting": "SettingsError",
    "run": "SettingsError",
}
#: Cases whose class is another than that of their kind.
OTHERS = {
    "setting: unknown keyword": "TypeError",
    "setting: path with NUL": "ModelFileError",
    "setting: overlap bogus": "UnknownNameError",
    "setting: dense warm": "UnknownNameError",
    "run: unknown run keyword": "TypeError",
    "run: record bogus": "UnknownNameError",
    "run: record none": "UnknownNameError",
    "run: record an array": "UnknownNameError",
    "run: start hot": "UnknownNameError",
}
SESSION_ERRORS = (
    "prompt empty",
    "prompt without ids",
    "prompt longer",
    "prompt as long",
    "n_predict too large",
    "score text too short",
    "score nothing",
    "score empty",
    "closed",
)
POLICY_ERRORS = (
    "policy",
    "residency policy",
    "drop cold",
    "cache prior",
)
#: What a message must name: the value given, or where it is.
SAYS = {
    "setting: cache of unknown unit": "'12 XB'",
    "setting: cache negative": "-1",
    "setting: more used than experts": "33",
    "setting: overlap hook": "'off' in this version",
    "model: first shard missing": "split-00001-of-00003.gguf",
    "model: second shard": "split-00001-of-00003.gguf",
    "model: dense": "llama",
    "model: tensor missing": "blk.2.ffn_gate_exps.weight",
    "model: cut by one byte": "cut short",
    "run: prompt longer than the context": "n_ctx=256",
    "run: policy class": "class DropCold",
    "run: drop cold without a cache": "cache budget 0",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run every case in one child; return what each gave, by name."""
    folder = tmp_path_factory.mktemp("bad")
    code = (
        "import pathlib, sys; from tests.integration import bad_input; "
        "bad_input.main(pathlib.Path(sys.argv[1]))"
    )
    child = run_child(code, str(folder))
    lines = [json.loads(x) for x in child.stdout.splitlines() if x.startswith("{")]
    begun = [x["begins"] for x in lines if "begins" in x]
    assert child.returncode == 0, f"the process died in {begun[-1:]}: {child.stderr[-2000:]}"
    return {x["name"]: x for x in lines if "name" in x} | {
        "rest": [x for x in lines if "usable" in x or "written" in x]
    }


def names(kind, cases):
    return [f"{kind}: {name}" for name in cases]


MODELS = [
    "not a GGUF",
    "text",
    "empty",
    "magic only",
    "big-endian",
    "old version",
    "cut in header",
    "cut in tensor table",
    "cut in tensor data",
    "cut by one byte",
    "dense",
    "no architecture",
    "unknown architecture",
    "huge string",
    "huge tensor count",
    "no expert used",
    "too many experts used",
    "absurd experts used",
    "other expert count",
    "too many blocks",
    "no heads",
    "tensor missing",
    "router missing",
    "folder",
    "missing",
    "below a file",
    "device",
    "later shards missing",
    "second shard",
    "first shard missing",
]
CASES = [
    *names("model", MODELS),
    *names("setting", bad_input.SETTINGS),
    *names("run", {**bad_input.RUNS, **bad_input.WITHOUT_CACHE, **bad_input.CLOSED}),
]


def expected_class(name):
    kind, _, rest = name.partition(": ")
    if name in OTHERS:
        return OTHERS[name]
    if kind == "run" and rest.startswith(SESSION_ERRORS):
        return "SessionError"
    if kind == "run" and rest.startswith(POLICY_ERRORS):
        return "PolicyError"
    return ERRORS[kind]


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_of_the_right_class_and_leaves_nothing(results, name):
    result = results[name]
    assert result["kinds"][0] == expected_class(name), result
    message = result["message"]
    assert message
    assert "\n" not in message
    if result["kinds"][0] != "TypeError":  # Python's own, as for any wrong keyword
        assert "BmoeLabError" in result["kinds"]
        # <name> must <rule>; got <value>[ where]. <next step>.
        assert re.fullmatch(r"[^;]+ must .+; got .+[.?]", message)
    assert SAYS.get(name, "") in message
    assert result["left"] is None, result["left"]


def test_bad_input_covers_every_case_tried(results):
    assert set(results) - {"rest"} == set(CASES)


def test_bad_input_leaves_sessions_usable_and_writes_nothing(results):
    assert results["rest"] == [{"usable": True}, {"usable": True}, {"written": []}]


CYCLES = """
import gc, json, os, sys, warnings
import bmoe_lab as bl
from tests.integration.session_tools import TEXT, open_demo, resources

def counts():
    gc.collect()
    with open("/proc/self/maps") as maps:
        n_map = sum(1 for _ in maps)
    with open("/proc/self/status") as status:
        rss = next(int(x.split()[1]) for x in status if x.startswith("RssAnon"))
    return {
        "native": len(os.listdir("/proc/self/task")), "maps": n_map, "anon_kib": rss,
        "fds": len(os.listdir("/proc/self/fd")), **resources(),
    }

def cycle(number):
    with open_demo(io_lanes=1 + number % 4, dense=("mmap", "anon")[number % 2]) as session:
        if number % 5 == 0:
            session.generate(TEXT, n_predict=2)

for number in range(10):
    cycle(number)
before = counts()
for number in range(50):
    cycle(number)
print(json.dumps([before, counts()]))
"""


def test_fifty_sessions_opened_and_closed_leak_nothing():
    child = run_child(CYCLES)
    assert child.returncode == 0, child.stderr
    before, after = json.loads(child.stdout)
    assert after["maps"] <= before["maps"] + 5  # the allocator's own
    # The allocator's fragments settle at some 25 MiB; of the context or the experts, 50 times the
    # smallest part would be 100 MiB.
    assert after["anon_kib"] < before["anon_kib"] + 40 * 1024
    for name in ("native", "fds", "threads", "descriptors", "mapped"):
        assert after[name] == before[name], name


DEMO = str(bad_input.DEMO)


@pytest.mark.parametrize(
    "arguments",
    [
        ["info", "{folder}/missing.gguf"],
        ["info", "{folder}/text.gguf"],
        ["info", DEMO, "--n-expert-used", "33"],
        ["score", "{folder}/missing.gguf", "--text", "hello"],
        ["score", DEMO, "--text", "hello", "--cache", "12 XB"],
        ["score", DEMO, "--text", "x"],
        ["score", DEMO, "--text", "x", "--file", "y"],
        ["score", DEMO, "--file", "{folder}/missing.txt"],
        ["score", DEMO, "--text", "hello " * 40, "--policy", "DropCold(9)"],
        ["score", DEMO, "--text", "hello " * 40, "--policy", "Dropcold(0.5)"],
        ["score", DEMO, "--text", "hello " * 40, "--policy", "__import__('os')"],
        ["record", DEMO, "--prompt", "", "--save", "{folder}/x.nc"],
        ["record", DEMO, "--prompt", "x", "--save", "{folder}/x.csv"],
        ["record", DEMO, "--prompt", "x", "--save", "{folder}/no/x.nc"],
        ["record", DEMO, "--prompt", "x", "--save", "/dev/full"],
        ["record", DEMO, "--prompt", "x", "--save", "{folder}/x.nc", "-n", "0"],
        ["recover", "{folder}/text.gguf", "--save", "{folder}/x.nc"],
    ],
)
def test_command_with_bad_input_gives_one_line_and_code_one(
    tmp_path, arguments, monkeypatch, capsys
):
    """In this process: none of these reaches llama.cpp with a file that could abort it."""
    from bmoe_lab.cli import main

    (tmp_path / "text.gguf").write_text("no model, but a text that is long enough\n" * 10)
    given = [x.replace("{folder}", str(tmp_path)) for x in arguments]
    monkeypatch.setattr("sys.argv", ["bmoe-lab", *given])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert [p.name for p in tmp_path.iterdir()] == ["text.gguf"]
