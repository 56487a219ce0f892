"""``bpsfast top``: shows a running job by the metrics that its nodes serve to Prometheus (`node.metrics`).

    scrape    one GET to one node
    sample    the changes between two scrapes: rates, lag
    watch     the nodes of a job: finds, scrapes and loses them
    screen    tables of a sample, on a terminal (rich) or as plain columns
"""
