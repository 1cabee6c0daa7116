"""The page of `hlatctl ui`: the web server in front of ``hlatctl.report.live``.

``app`` routes requests to ``answers`` and ``control``, and ``session`` decides who may send them. ``stream`` notifies
pages of changes. ``serve`` runs all of it, with Prefect's and MLflow's servers behind it.
"""
