/* When waits stay awake, and for how long: the rules of crowd.h and port.h, without a clock. Ends with 0 if they hold. */
#undef NDEBUG
#include <assert.h>
#include <string.h>

#include "port.h"

enum { MS = 1000000 };

static void pauses(void)
{
    struct bps_crowd crowd = {0};
    assert(!bps_is_crowded(&crowd, 0));
    bps_crowd_slow(&crowd, 10 * MS);
    assert(bps_is_crowded(&crowd, 12 * MS - 1) && !bps_is_crowded(&crowd, 12 * MS));

    bps_crowd_slow(&crowd, 20 * MS); /* again, and nothing met: twice as long, up to the most */
    assert(bps_is_crowded(&crowd, 24 * MS - 1) && !bps_is_crowded(&crowd, 24 * MS));
    for (int i = 0; i < 100; i++)
        bps_crowd_slow(&crowd, 30 * MS);
    assert(bps_is_crowded(&crowd, 158 * MS - 1) && !bps_is_crowded(&crowd, 158 * MS));

    for (int i = 0; i < BPS_MANY_MET - 1; i++) /* too few to tell */
        assert(bps_crowd_met(&crowd));
    bps_crowd_slow(&crowd, 200 * MS);
    assert(bps_is_crowded(&crowd, 328 * MS - 1));
    for (int i = 0; i < BPS_MANY_MET; i++)
        bps_crowd_met(&crowd);
    bps_crowd_slow(&crowd, 400 * MS); /* one among many that were met */
    assert(!bps_is_crowded(&crowd, 402 * MS));
}

static void patience(void)
{
    struct bps_port port;
    memset(&port, 0, sizeof port);
    assert(bps_port_patience(&port) == 0); /* who is not to stay awake never does */
    port.awake_ns = 50;
    assert(bps_port_patience(&port) == 200);
    bps_port_learn(&port, 201);
    assert(bps_port_patience(&port) == 200); /* one long wait */
    for (int i = 0; i < 5; i++)
        bps_port_learn(&port, 201);
    assert(bps_port_patience(&port) == 50);
    bps_port_learn(&port, 200); /* it slept, but need not have */
    assert(bps_port_patience(&port) == 200);
}

int main(void)
{
    pauses();
    patience();
    return 0;
}
