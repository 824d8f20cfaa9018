"""What the source must not do, wherever it is: run text as code or in a shell, unpickle, ask the environment."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "dvla"
TREES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}

FORBIDDEN = {
    *("eval", "exec", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("pickle.load", "pickle.loads", "marshal.load", "marshal.loads", "shelve.open", "yaml.load", "yaml.unsafe_load"),
    *("numpy.load", "np.load", "joblib.load", "torch.jit.load"),
}
UNPICKLES = {"runtime/safe_reading.py"}
"""May subclass `pickle.Unpickler`, to say what it may find."""
MAY_READ_THE_ENVIRONMENT = {
    "collect.py": "threads of the processes it starts",
    "doctor.py": "which renderer is chosen",
    "entry.py": "what torchrun says of the rank",
    "envs/egl_devices.py": "which GPUs there are",
    "envs/libero_setup.py": "the simulator's own settings",
    "envs/light_meshes.py": "where caches lie",
    "envs/maniskill_setup.py": "the simulator's own settings",
    "envs/pool.py": "workers inherit it",
    "telemetry/redact.py": "secrets to keep out of files",
}


def name_of(node: ast.expr) -> str:
    """``a.b.c`` of such an expression, else nothing."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def faults(tree: ast.Module, file: str) -> list[str]:
    """What is wrong, with line numbers."""
    found = []
    for node in ast.walk(tree):
        name = name_of(node.func) if isinstance(node, ast.Call) else ""
        if name in FORBIDDEN:
            found.append(f"{node.lineno}: {name}")
        if isinstance(node, ast.Call):
            given = {word.arg: word.value for word in node.keywords}
            if "shell" in given and not (isinstance(given["shell"], ast.Constant) and given["shell"].value is False):
                found.append(f"{node.lineno}: shell=")
            weights_only = given.get("weights_only")
            if name == "torch.load" and not (isinstance(weights_only, ast.Constant) and weights_only.value is True):
                found.append(f"{node.lineno}: torch.load without weights_only=True")
        if isinstance(node, ast.ImportFrom) and {f"{node.module}.{alias.name}" for alias in node.names} & FORBIDDEN:
            found.append(f"{node.lineno}: imports a forbidden function by name")
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv"}
        ):
            found.append(f"{node.lineno}: imports the environment by name")
        if isinstance(node, ast.Attribute) and name_of(node) == "pickle.Unpickler" and file not in UNPICKLES:
            found.append(f"{node.lineno}: pickle.Unpickler")
        is_environment = isinstance(node, ast.Attribute) and name_of(node) in ("os.environ", "os.getenv")
        if is_environment and not file.startswith("runtime/") and file not in MAY_READ_THE_ENVIRONMENT:
            found.append(f"{node.lineno}: {name_of(node)}")
    return found


def test_the_source_keeps_to_it():
    assert {file: found for file, tree in TREES.items() if (found := faults(tree, file))} == {}


def test_exceptions_are_still_needed():
    for file in MAY_READ_THE_ENVIRONMENT:
        assert any(
            name_of(node) == "os.environ" for node in ast.walk(TREES[file]) if isinstance(node, ast.Attribute)
        ), file


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=flag)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "pickle.loads(b'')",
        "class A(pickle.Unpickler): pass",
        "from pickle import load",
        "from os import environ",
        "x = os.environ['A']",
        "x = os.getenv('A')",
    ],
)
def test_each_kind_is_found(code):
    assert faults(ast.parse(code), "planes/x.py")


def test_what_is_allowed_is_not():
    allowed = "subprocess.run(['ls'], shell=False); torch.load(f, weights_only=True); policy.eval(); yaml.safe_load(s)"
    assert faults(ast.parse(allowed), "planes/x.py") == []
