"""The experiments behind docs/results.md: their predictions, and the scripts that turn them into pages.

    python -m study.collect runs/smollm2    # add the predictions of a finished run to study/data
    python -m study.write                   # write the tables and the figure of the pages (`make results`)

Read the modules in this order:

- names: how a variant of a method is named, and its title in a table;
- store: the files of a study, `study/data/NAME.parquet` and `study/data/NAME.json`;
- collect: a run folder -> the files of a study;
- load: the files of a study -> measured numbers;
- tables, ablation, objectives, claims, figures: numbers -> Markdown tables and the figure;
- write: the blocks of the pages.

`study.reasons` writes the teacher's responses of the study with reasoning, and `study.probe` fits a linear probe on the
models of a run.
"""
