"""The control plane: who takes part, what is summed where and in which order. Decides; never touches tensor bytes.

    messages     what is said          job          what the scheduler decides (pure)
    partition    tensor -> partitions  placement    partition -> owner (pure)
    credit_queue what is sent next     scheduler    the ZeroMQ loop around `job`
    card_queue   and to whom           write_order  before what else
    membership   a node's side of it   security     the job key: CURVE, HMAC
    losses       who is lost           recovery     what becomes of a lost helper's sums (pure)
    inquiries    who is missing, who is late

Imports the standard library, pyzmq and msgspec only.
"""
