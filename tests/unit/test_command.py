"""The command ``dvla``: what it lists, what it refuses, what it hands on."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dvla import command

README = Path(__file__).parents[2] / "README.md"


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["dvla", *words])
    command.main()


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_it_lists_every_program_with_an_example(monkeypatch, capsys, words):
    call(monkeypatch, *words)
    shown = capsys.readouterr().out
    for name, (what, example) in command.COMMANDS.items():
        assert re.search(rf"  {name} +{re.escape(what)}\n +dvla {name} ?{re.escape(example)}\n", shown)
        assert find_spec(f"dvla.{name}")


def test_every_program_of_the_package_is_a_command():
    """What has an entry of its own, `python -m dvla.NAME`, is told of."""
    programs = {
        path.stem
        for path in Path(command.__file__).parent.glob("*.py")
        if '__name__ == "__main__"' in path.read_text() and path.stem != "__main__"
    }
    assert programs == set(command.COMMANDS)


def test_another_word_is_refused_with_the_nearest(monkeypatch, capsys):
    for word, hint in (("trian", "did you mean train?"), ("qqq", "there are train, sft, ")):
        with pytest.raises(SystemExit) as caught:
            call(monkeypatch, word)
        assert caught.value.code == 2
        assert f"there is no command {word}: {hint}" in capsys.readouterr().err


def test_a_program_gets_its_words_and_its_own_name(monkeypatch):
    import dvla.report

    seen = []
    monkeypatch.setattr(dvla.report, "main", lambda: seen.append(list(sys.argv)))
    call(monkeypatch, "report", "runs/mine", "--help")
    assert seen == [[dvla.report.__file__, "runs/mine", "--help"]]


def test_the_list_needs_no_torch():
    code = "import sys; from dvla.command import main; sys.argv = ['dvla']; main(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_several_runs_in_one_process_are_refused_and_not_forgotten(tmp_path):
    words = ("-m", "experiment=reach", "seed=1,2", f"run.root={tmp_path}")
    done = subprocess.run(
        [sys.executable, "-m", "dvla.train", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "start one command for each, as in for seed in 1 2; do" in done.stderr + done.stdout
    assert not (tmp_path / "reach").exists()
