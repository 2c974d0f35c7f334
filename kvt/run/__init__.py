"""One run: from a configuration to its result, its folder and its checkpoints. Read in this order:

* `sections.py`, `config.py`: RunConfig, what a run is, as plain data; `settings.py` parses what a user gives for it.
* `run.py`: builds data, task and Trainer from it, and trains, validates, tests or predicts.
* `folder.py`, `start.py`: where its files lie, and who may write them; `results.py` writes what it has come to.
* `recorder.py`, `checkpoints.py`, `callbacks.py`, `loggers.py`, `pictures.py`: what happens while it trains.
* `load_checkpoint.py`: a trained model from a file, as plain data; `same.py`: what may differ from its run.
"""
