/* Hooks: the functions by which a transport reports to an engine. Callable from any thread, without the GIL. */
#pragma once

#include <stdint.h>

/* Bytes (or an empty contribution) of `part`, round `round`, have arrived whole from `source`. */
typedef void (*bps_arrived_fn)(void *engine, uint32_t source, uint32_t part, uint32_t round, uint32_t flags);

/* Tell the node's Python loop: an EVENT_* of the engine. `code` is an errno for EVENT_LOST. */
typedef void (*bps_notify_fn)(void *engine, uint32_t kind, uint32_t source, uint32_t part, uint32_t round,
                              uint32_t code, uint64_t nbytes);

enum { BPS_EVENT_FORWARD = 1, BPS_EVENT_RESULT = 2, BPS_EVENT_DELIVERED = 3, BPS_EVENT_LOST = 4 };
