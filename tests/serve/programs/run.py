"""Run the checks of a program in another interpreter, each by itself: `python run.py PROGRAM URL GIVEN`.

The last line has, as JSON, what each check has raised.
"""

import importlib
import json
import sys
import traceback

found: dict[str, str | None] = {}
for name, check in vars(importlib.import_module(sys.argv[1])).items():
    if name.startswith("check_"):
        try:
            check()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
print(json.dumps(found))
