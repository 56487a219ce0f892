/* Hooks: the functions by which a transport reports to an engine. Callable from any thread, without the GIL. */
#pragma once

#include <stdint.h>

/* Bytes (or an empty contribution) of `part`, round `round`, have arrived whole from `source`. */
typedef void (*bps_arrived_fn)(void *engine, uint32_t source, uint32_t part, uint32_t round, uint32_t flags);

/* Report an EVENT_* of the engine. Of EVENT_LOST `code` is an errno, and `nbytes` the number of the link. */
typedef void (*bps_notify_fn)(void *engine, uint32_t kind, uint32_t source, uint32_t part, uint32_t round,
                              uint32_t code, uint64_t nbytes);

/* Queue a write of nbytes at `address` into `slot` of the peer of a stream, or send it at once if that waits for
 * nothing and `may_be_at_once`. 0 or an errno. If it is done with the bytes `is_delivered` becomes 1; else it stays, the
 * bytes stay, and EVENT_DELIVERED follows. */
typedef int (*bps_post_fn)(void *stream, uint32_t slot, uint32_t round, uint32_t flags, uint64_t address,
                           uint64_t nbytes, int may_be_at_once, int *is_delivered);

/* Let an engine send by a dispatch from now on; NULL: by none. */
typedef void (*bps_attach_fn)(void *engine, void *dispatch);

/* DUE: a dispatch has more to send, and somebody else is to go on with it; it never reaches Python. */
enum { BPS_EVENT_FORWARD = 1, BPS_EVENT_RESULT = 2, BPS_EVENT_DELIVERED = 3, BPS_EVENT_LOST = 4, BPS_EVENT_DUE = 5 };

/* In the flags of `bps_arrived_fn`: more has arrived behind it, for which the receiving thread is needed. */
#define BPS_MORE_ARRIVED (1u << 31)
