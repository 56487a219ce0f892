/* Driver for compilers without a fuzzer: files and folders named on the command line are seeds, which it runs as they
 * are and then damages, blindly, for so many seconds. The same arguments are the same run, but for its length. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>

#include "input.h"

enum { MOST_SEEDS = 256, MOST_NBYTES = 4096 };

static struct {
    uint8_t data[MOST_NBYTES];
    size_t nbytes;
} seeds[MOST_SEEDS];
static size_t n_seeds;
static uint64_t state = 88172645463325252u;

static uint64_t draw(uint64_t n)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % n;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void read_seed(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL || n_seeds == MOST_SEEDS) {
        fprintf(stderr, "cannot take %s\n", path);
        exit(2);
    }
    seeds[n_seeds].nbytes = fread(seeds[n_seeds].data, 1, MOST_NBYTES, file);
    n_seeds++;
    fclose(file);
}

/* Run it from memory of exactly its size: a read beyond it is seen. */
static void run(const uint8_t *data, size_t nbytes)
{
    uint8_t *copy = malloc(nbytes);
    if (nbytes != 0)
        memcpy(copy, data, nbytes);
    LLVMFuzzerTestOneInput(copy, nbytes);
    free(copy);
}

static size_t damage(uint8_t *data, size_t nbytes)
{
    static const uint32_t numbers[] = {0, 1, 7, 8, 24, 64, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff};
    for (uint64_t i = draw(6); i-- > 0;) {
        size_t at = nbytes ? draw(nbytes) : 0, n = draw(32) + 1;
        switch (draw(6)) {
        case 0: if (nbytes) data[at] ^= (uint8_t)(1u << draw(8)); break;
        case 1: if (nbytes) data[at] = (uint8_t)draw(256); break;
        case 2: if (at + 4 <= nbytes) memcpy(data + at / 4 * 4, &numbers[draw(10)], 4); break;
        case 3: nbytes = at; break;
        case 4:
            for (; n > 0 && nbytes < MOST_NBYTES; n--)
                data[nbytes++] = (uint8_t)draw(256);
            break;
        default: /* a piece of another one */
            if (n_seeds != 0) {
                size_t other = draw(n_seeds), from = seeds[other].nbytes ? draw(seeds[other].nbytes) : 0;
                for (; n > 0 && from < seeds[other].nbytes && at < MOST_NBYTES; n--)
                    data[at++] = seeds[other].data[from++];
                nbytes = at > nbytes ? at : nbytes;
            }
        }
    }
    return nbytes;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s SECONDS [SEEDS...]\n", argv[0]);
        return 2;
    }
    for (int i = 2; i < argc; i++) {
        struct stat what;
        DIR *folder = stat(argv[i], &what) == 0 && S_ISDIR(what.st_mode) ? opendir(argv[i]) : NULL;
        struct dirent *entry;
        char path[4096];
        if (folder == NULL)
            read_seed(argv[i]);
        while (folder != NULL && (entry = readdir(folder)) != NULL) {
            snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
            if (entry->d_name[0] != '.')
                read_seed(path);
        }
        if (folder != NULL)
            closedir(folder);
    }
    for (size_t i = 0; i < n_seeds; i++)
        run(seeds[i].data, seeds[i].nbytes);
    uint64_t n_runs = n_seeds;
    for (double end = now() + atof(argv[1]); now() < end; n_runs++) {
        uint8_t data[MOST_NBYTES] = {0};
        size_t from = n_seeds ? draw(n_seeds) : 0, nbytes = n_seeds ? seeds[from].nbytes : draw(256);
        memcpy(data, seeds[from].data, seeds[from].nbytes);
        run(data, damage(data, nbytes));
    }
    printf("%lu runs\n", (unsigned long)n_runs);
    return 0;
}
