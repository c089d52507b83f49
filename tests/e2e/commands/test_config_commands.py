"""`tocsin init`, `check` and `schema` as a user runs them, in real processes."""

from __future__ import annotations

import json
import sys

import jsonschema

from support.processes.site import SCRIPTS, Site
from tocsin.schemas.configuration.yaml_document import load

BAD = """\
version: 1
secrets:
  hook: {env: TOCSIN_TEST_HOOK}
receivers:
  hook:
    {type: webhook, url: "https://me:s3cr3t@hooks.example.com/t0ken", sign: {key: {secret: hoo}}}
rules:
  - nonfinit: [stop, hook]
  - exploding_gradient: [stop, {stop: {grace: 30}}]
"""


def test_a_new_file_is_written_checked_and_used(embedded_site: Site) -> None:
    embedded_site.config.unlink()

    made = embedded_site.tocsin("init")
    checked = embedded_site.tocsin("check")

    assert (made.returncode, made.stderr) == (0, "")
    assert (
        made.stdout
        == "wrote tocsin.yaml; to see the settings in effect: tocsin check tocsin.yaml\n"
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.startswith("tocsin.yaml: no problems\n  bus        embedded:.tocsin/")
    finished = embedded_site.run(sys.executable, str(SCRIPTS / "no_torch.py"))
    assert finished.exit_code == 0, finished


def test_a_file_is_never_overwritten(embedded_site: Site) -> None:
    before = embedded_site.config.read_text()

    made = embedded_site.tocsin("init")

    assert made.returncode == 2
    assert made.stdout == ""
    assert made.stderr.startswith("tocsin: tocsin.yaml already exists; nothing was written.")
    assert "tocsin init tocsin-new.yaml" in made.stderr
    assert embedded_site.config.read_text() == before
    assert embedded_site.tocsin("init", "tocsin-new.yaml").returncode == 0


def test_check_says_all_that_is_wrong_and_no_secret(embedded_site: Site) -> None:
    embedded_site.config.write_text(BAD)

    checked = embedded_site.tocsin("check")
    as_json = embedded_site.tocsin("check", "--json", "tocsin.yaml")

    assert (checked.returncode, checked.stderr) == (2, "")
    found = json.loads(as_json.stdout)["files"][0]
    assert as_json.returncode == 2
    assert [(p["line"], p["column"], p["code"]) for p in found["problems"]] == [
        (6, 26, "invalid_value"),
        (6, 92, "unknown_secret"),
        (8, 5, "unknown_rule"),
        (9, 47, "invalid_value"),
    ]
    for problem in found["problems"]:
        place = f"tocsin.yaml:{problem['line']}:{problem['column']}: "
        assert f"{place}{problem['message']} [{problem['code']}]" in checked.stdout
    for secret in ("s3cr3t", "t0ken"):
        assert secret not in checked.stdout + as_json.stdout


def test_several_files_are_checked_and_one_bad_one_decides(embedded_site: Site) -> None:
    (embedded_site.folder / "bad.yaml").write_text(BAD)

    checked = embedded_site.tocsin("check", "tocsin.yaml", "bad.yaml")

    assert checked.returncode == 2
    assert "tocsin.yaml: no problems" in checked.stdout
    assert "bad.yaml: 4 problems" in checked.stdout


def test_without_a_file_the_defaults_hold(embedded_site: Site) -> None:
    embedded_site.config.unlink()

    checked = embedded_site.tocsin("check")
    missing = embedded_site.tocsin("check", "missing.yaml")

    assert checked.returncode == 0
    assert checked.stdout.startswith("no file: the defaults apply\n")
    assert missing.returncode == 2
    assert "missing.yaml" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_the_printed_schema_fits_the_file_of_a_site(embedded_site: Site) -> None:
    printed = embedded_site.tocsin("schema")

    assert (printed.returncode, printed.stderr) == (0, "")
    schema = json.loads(printed.stdout)
    assert schema["$defs"]["NonfiniteParams"]["properties"]["for_steps"]["default"] == 1
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(load(embedded_site.config.read_text(), source="").data)
