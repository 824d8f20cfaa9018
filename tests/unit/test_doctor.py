"""What `dvla doctor` makes of what it finds, and the whole of it on this machine."""

import subprocess
import sys

import pytest

from dvla.doctor import MISSING, OK, WARNING, drawing, enough, examine, packages


def test_a_package_must_be_there_and_fit():
    installed = {"torch": "2.13.0+cpu", "numpy": "2.4.0", "hydra-core": "1.4.0"}
    wanted = ["torch<2.15,>=2.11", "numpy", "hydra-core<1.4,>=1.3.2", "peft", 'ruff; extra == "dev"']
    found = {finding.what: finding for finding in packages(wanted, installed.get)}
    assert {name: finding.verdict for name, finding in found.items()} == {
        "torch": OK,
        "numpy": OK,
        "hydra-core": MISSING,
        "peft": MISSING,
    }
    assert found["hydra-core"].remedy == "pip install 'hydra-core<1.4,>=1.3.2'"
    assert found["peft"].found == "not installed"
    assert found["numpy"].remedy == ""


@pytest.mark.parametrize(("amount", "verdict"), [(3.9, WARNING), (4, OK), (100, OK)])
def test_too_little_is_a_warning_with_a_remedy(amount, verdict):
    finding = enough("memory", amount, 4, "GiB", "lower something")
    assert (finding.verdict, finding.remedy) == (verdict, "" if verdict == OK else "lower something")


def test_one_way_of_drawing_is_enough():
    assert drawing("x", {"egl": "no device", "osmesa": None}, "install").found == "draws with osmesa"
    nothing = drawing("x", {"egl": "no device", "osmesa": "exit code -11"}, "install")
    assert nothing == ("x", MISSING, "egl: no device; osmesa: exit code -11", "install")


def test_this_machine_has_what_the_tests_need():
    assert [finding for finding in examine() if finding.verdict == MISSING] == []


def test_something_missing_is_an_exit_code():
    code = (
        "from dvla import doctor; doctor.examine = lambda: [doctor.Finding('x', doctor.MISSING, 'gone [x]', 'get it')]; "
        "doctor.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "gone [x]" in done.stdout
    assert "get it" in done.stdout
    assert "1 missing" in done.stdout
