"""A run: a configuration becomes a result, a folder and checkpoints. Read the files in this order:

* `sections.py`, `config.py`: `RunConfig`, the configuration of a run as plain data. `settings.py` parses settings.
* `run.py`: builds data, task and Trainer from a configuration, and trains, validates, tests or predicts.
* `folder.py`, `start.py`: the folder of a run, its lock and its loggers; `results.py` writes result.json.
* `recorder.py`, `checkpoints.py`, `callbacks.py`, `loggers.py`, `pictures.py`: callbacks and loggers of training.
* `load_checkpoint.py`: loads a trained model from a checkpoint as plain data. `same.py` compares settings and data
  with the settings and data of a checkpoint's run.
"""
