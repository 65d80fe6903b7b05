"""Fail unless a wheel's top level holds exactly `bertgeo_cli` and `analyses`, with the sample corpus inside."""

import sys
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
if top != {"bertgeo_cli", "analyses"}:
    sys.exit(f"the wheel's top level holds {sorted(top)}")
if "bertgeo_cli/sample_data/sentences.txt" not in names:
    sys.exit("the wheel lacks the sample corpus")
print(f"wheel: {len(names)} files, top level {sorted(top)}")
