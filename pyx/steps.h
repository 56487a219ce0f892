/* Steps: how long each step of a rank took, and how much of that was spent in our calls. One thread ends steps. */
#pragma once

#include "lane.h"

struct bps_step {
    uint64_t step_ns, exposed_ns, communication_ns, hidden_ns;
};

struct bps_steps {
    uint64_t n_begun, begin_ns, begin_exposed_ns;
    uint64_t last_result_ns; /* when the newest result that was waited for was published */
    struct bps_step last;    /* the step that ended last */
    uint64_t sample_ns;      /* when the speed is to be sampled next */
};

/* Count that a call of the rank has lasted since `entered_ns`. Any thread. */
static inline void bps_steps_blocked(struct bps_tally *tally, uint64_t entered_ns)
{
    bps_count(&tally->exposed_ns, bps_now_ns() - entered_ns);
}

/* Note that a result was published. Two threads may do this at once: one of the two times is lost. */
static inline void bps_steps_result(struct bps_steps *steps, uint64_t published_ns)
{
    if (published_ns > bps_counted(&steps->last_result_ns))
        __atomic_store_n(&steps->last_result_ns, published_ns, __ATOMIC_RELAXED);
}

static inline uint64_t bps_least(uint64_t one, uint64_t other) { return one < other ? one : other; }

/* End the step that goes on at `now_ns` and begin the next. What came before the first call, and the first step, in
 * which memory is found, are not counted. Communication is hidden as far as it took longer than what was exposed.
 * One thread at a time. */
static inline void bps_steps_next(struct bps_steps *steps, struct bps_tally *tally, uint64_t now_ns)
{
    uint64_t exposed_ns = bps_counted(&tally->exposed_ns);
    if (steps->n_begun > 1) {
        struct bps_step *last = &steps->last;
        last->step_ns = now_ns - steps->begin_ns;
        last->exposed_ns = bps_least(exposed_ns - steps->begin_exposed_ns, last->step_ns);
        uint64_t result_ns = bps_counted(&steps->last_result_ns);
        last->communication_ns = result_ns - bps_least(result_ns, steps->begin_ns);
        last->hidden_ns = last->communication_ns - bps_least(last->communication_ns, last->exposed_ns);
        bps_count_alone(&tally->step_ns, last->step_ns);
        bps_count_alone(&tally->step_exposed_ns, last->exposed_ns);
        bps_count_alone(&tally->communication_ns, last->communication_ns);
        bps_count_alone(&tally->hidden_ns, last->hidden_ns);
        bps_count_alone(&tally->steps, 1);
    }
    steps->n_begun++;
    steps->begin_ns = now_ns;
    steps->begin_exposed_ns = exposed_ns;
}
