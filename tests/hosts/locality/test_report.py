from jaxpace.diagnosis.diagnose import diagnose
from jaxpace.diagnosis.report_json import to_json
from jaxpace.files.plain import to_plain
from jaxpace.hosts.locality.read import read_locality
from jaxpace.trace import rundir
from jaxpace.trace.reader import read_run
from tests.hosts.locality import machines
from tests.synthetic import made_up_runs


def test_the_report_carries_the_warnings_of_where_the_run_ran(tmp_path):
  made_up_runs.write(tmp_path / "run", made_up_runs.MadeUpJob(ranks=4, steps=30, processes=2))
  assert (to_json(diagnose(read_run(tmp_path / "run")))["locality"]
          == {"processes": 0, "warnings": []})
  place = read_locality(machines.laptop(tmp_path / "root"))._replace(hostname="host0")
  for process in range(2):
    rundir.write_json(tmp_path / "run" / "locality" / f"{process}.json",
                      to_plain(place._replace(process=process)))
  locality = to_json(diagnose(read_run(tmp_path / "run")))["locality"]
  assert locality["processes"] == 2
  assert [(w["kind"], w["host"], w["processes"]) for w in locality["warnings"]] == [
      ("cpu_limit", "host0", [0, 1]), ("clock_source", "host0", [0, 1])]
