"""Bills of materials that are true: of an environment, a dataset, a model. Knows nothing of gates.

`inventory` reads what is installed, `graph` draws what needs what, `environment` describes it; `validate`,
`diff` and `score` judge documents, also foreign ones. Nothing that is described is ever imported.
"""
