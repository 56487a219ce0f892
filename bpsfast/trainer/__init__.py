"""The trainer side: what runs inside the user's training process. Imports no framework.

    process           init, shutdown, rank, size; how a process joins and leaves jobs
    session           what a rank owns in one job        node_connection    attaching to the node, messages to it
    handle            push_pull and its handles          broadcaster        broadcast; object_broadcast: arrays, objects
    gradients         the step API                       gradient_layout    units and memory of a model's gradients
    unit              rounds of one tensor or bucket     guarded_port       the native port, with errors that name ranks
    tensor_input      what users pass -> an address      tensor_registry    names, declarations, deferred pushes
    input_memory      segments shared with the node      chunk_descriptors  chunks for pipelined transfers
    sparse_table      push_pull_rows                     async_weights      weights that owners keep
    bundle            all tensors of one framework call  codec_state        error feedback state, saved and loaded
    stall_inspector   waits, deadlines and warnings      stats, step_clock  where the time of steps went
    tuner             the setting autotune; tuning_search, tuning_trials: what it tries
    exit_handling     sessions when the program ends, fails or forks
    arguments         checked arguments of calls         key_value_client   short values shared by all ranks
    gpu               tensors on devices
"""
