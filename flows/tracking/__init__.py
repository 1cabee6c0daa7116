"""Views of the journal, which may be down: MLflow, Prefect, other mirrors and messages; the servers of `hlatctl ui`.

``mlflow_sync`` copies a run, ``mlflow_sweep`` a sweep, ``mlflow_register`` an exported model, and ``mirrors`` a run to
other services; ``follower`` starts each alongside a flow, and ``following`` is their loop. ``prefect_api`` finds or
starts an API, ``prefect_flow`` and ``prefect_sweep`` report to it, and ``prefect_stale`` marks flow runs whose process
has died. ``notify`` sends messages to people. ``ui`` serves the pages of MLflow and Prefect; ``local_server``
authenticates requests.
"""
