"""The experiments behind docs/results.md: the stored predictions, and the scripts that turn them into pages.

    python -m study.collect runs/smollm2    # add the predictions of a finished run to study/data
    python -m study.write                   # write the tables and the figure into the pages (`make results`)

Read the modules in this order:

- names: how variants of a method are named, and their titles in tables;
- store: read and write the files of a study, `study/data/NAME.parquet` and `study/data/NAME.json`;
- collect: turn a run folder into the files of a study;
- load: measure the files of a study;
- tables, ablation, objectives, claims, figures: turn the measured numbers into Markdown tables and the figure;
- write: put the tables into the pages.

`study.reasons` writes the teacher responses for the study with reasoning. `study.probe` fits a linear probe on the
models of a run.
"""
