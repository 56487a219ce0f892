"""RDMA verbs for the transport and the tools: what completions mean (`completions`)."""
