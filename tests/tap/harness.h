/* What harness.c (the kernel) and harness_daemon.c (the daemon) share. */
#ifndef HARNESS_H
#define HARNESS_H

#include "../../cachefs/fuse/_tap.h"

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);     \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

enum { DUMP = 63, MAX_WRITE = 65536 };

/* Backing ids as the kernel numbers them, in memory that outlasts the daemon. */
struct ids {
    int last;
    uint8_t open[1 << 20];
};

extern struct ids *ids;
extern int device[2]; /* [0] the kernel's end, [1] the daemon's */
extern int resent[2]; /* a pipe: a byte for each resend that is done */
extern ssize_t (*io_read)(int, void *, size_t, void *);
extern ssize_t (*io_writev)(int, struct iovec *, int, void *);

ssize_t __real_write(int fd, const void *data, size_t size);
uint64_t any(uint64_t below); /* a random number */
void attach(int state_fd);
void run_names(int steps);
void run_paused(void);
void run_stalls(int steps);
void run_ranks(int steps);
void run_crowd(void);
void daemon_main(int state_fd, int file, uint64_t epoch);

#endif
