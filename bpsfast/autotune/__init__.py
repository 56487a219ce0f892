"""Tuning a job while it trains: what is tried next, for how long, and what was found before. Pure but for `store`.

    point    what can be changed in a running job      pilot    trials one after another: what the next step uses
    search   Bayesian optimisation on a grid           model    what the planner expects of a point
    store    results by model and cluster
"""
