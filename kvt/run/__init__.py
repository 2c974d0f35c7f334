"""A run makes a result, a folder and checkpoints from a configuration. Read the files in this order:

* `config.py`: `RunConfig`, the configuration of a run as plain data; `sections.py` lists its sections.
* `cli.py`: `KvtCLI`, a `LightningCLI` that makes data and task from a configuration and flags.
* `fit.py`: makes the Trainer, and trains, validates, tests or predicts.
* `folder.py`: the folder of a run and its lock; `results.py` writes result.json.
* `callbacks.py`: the history, the checkpoints and the end of a run.
* `load_checkpoint.py`: loads a trained model from a checkpoint, and runs no code of the checkpoint.
"""
