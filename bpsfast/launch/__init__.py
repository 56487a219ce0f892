"""Start and watch the processes of a job. Design: bpsfast/docs/design/launch.md, security.md.

    roles             the role of this process, from the variables of `environments`, `slurm` or a store (`rendezvous`)
    daemons           scheduler and node, as a rank or a command starts them
    local_job         `bpsfast run` on this machine, by the `supervisor` of `processes`
    ssh_job           the same on other hosts: `remote_hosts`, and `remote_agent` there
    elastic_job       `bpsfast run --elastic`, here or on hosts that come and go: `elastic_hosts`, `host_discovery`
    namespaces        clusters inside one machine
    stale_resources   `bpsfast clean`
"""
