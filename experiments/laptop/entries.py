"""Train entries of the track "Fewest steps" of RECORDS.md: NorMuon and SOAP, with the fields that the sweeps found.

Question    how few steps does an optimiser need for a loss of 1.88?
Reference   the entries `../zoo/normuon.py` and `../zoo/soap.py` of the zoo. SOAP is set as in track 3 of modded-nanogpt: for matrices
            only, with a new basis in each step.
Change      the optimiser of `base.py`. Its fields are from ../results/laptop/sweeps.json.
Command     python experiments/records.py experiments/laptop/entries.py:soap --data.path shakespeare.txt --steps N
                --out experiments/results/records/soap.json --against experiments/laptop/entries.py:normuon
Expected    by straight lines between the study's losses after 100 and 200 steps: NorMuon 245 steps, SOAP 225.
Result      see ../RECORDS.md.
Verdict     see ../RECORDS.md.
"""

import dataclasses
from pathlib import Path

import base

from jaxgpt import OptimConfig
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.runs.code import run_file

SHELF = Path(__file__).resolve().parents[1] / "zoo"

rates = {"muon_learning_rate": 0.01529, "learning_rate": 0.01474}
optim = dataclasses.replace(load_experiment(str(SHELF / "normuon.py")).optim, **rates)
normuon = dataclasses.replace(base.experiment, name="laptop-normuon", optim=optim)

fields = {field.name: getattr(base.adamw.optim, field.name) for field in dataclasses.fields(OptimConfig)}
fields |= {"muon_learning_rate": 0.003934, "learning_rate": 0.006841, "beta2": 0.95}
optim = run_file(SHELF / "soap.py").SoapMatricesConfig(**fields, refresh_every=1)
soap = dataclasses.replace(base.experiment, name="laptop-soap", optim=optim)
