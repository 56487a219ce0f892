"""A running job as its nodes' exporters (`node.metrics`) tell of it: asked once per sample, told by nobody else.

    scrape    one GET to one node
    sample    what lies between two of them: rates, who is late, in one struct
    watch     all nodes of one job: found, asked at the same time, gone
    screen    tables of a sample, on a terminal (rich) or as plain columns
"""
