"""The rank's side: what runs inside the user's trainer process. Imports no framework and no compiler.

    current       init, shutdown, rank, size     session      what a rank owns
    handle        push_pull and its handles      gradients    the step API
    broadcaster   broadcast                      unit         input, rounds and result of one tensor or group
    tensor_input  what users pass -> an address  guarded_port the native port, with errors that say who is to blame
    attachment    how a rank joins its node      mailbox      the socket to it
    memory        segments and input memory      notice_board what all ranks may look up
"""
