"""In which order, where, and what when it breaks.

``stages`` are plain functions; ``pretrain`` decorates them for Prefect and does nothing else; ``launch`` starts
processes behind one protocol; ``recovery`` decides what follows a failure; ``mirror`` copies the journal to MLflow.
Never imports torch, ``trainer`` or ``eval``: it launches them and reads what they write.
"""

#: Read by `hlatctl.__main__`: another distribution may own a package of this name.
OWNER = "hlatctl"
