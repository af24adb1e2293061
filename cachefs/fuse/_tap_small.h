/* Small files that are made without Python: see the head of _tap_small.c. */
#ifndef CACHEFS_TAP_SMALL_H
#define CACHEFS_TAP_SMALL_H

#include "_tap.h"

#pragma GCC visibility push(hidden)

/* ---- FUSE protocol, what is answered here ---- */

struct create_in {
    uint32_t flags, mode, umask, open_flags;
};

struct fuse_attr {
    uint64_t ino, size, blocks, atime, mtime, ctime;
    uint32_t atimensec, mtimensec, ctimensec, mode, nlink, uid, gid, rdev, blksize, flags;
};

struct attr_out {
    uint64_t attr_valid;
    uint32_t attr_valid_nsec, dummy;
    struct fuse_attr attr;
};

struct entry_out {
    uint64_t nodeid, generation, entry_valid, attr_valid;
    uint32_t entry_valid_nsec, attr_valid_nsec;
    struct fuse_attr attr;
};

/* ---- The journal: records one behind the other, each followed by the name, padded ---- */

enum { RECORD_CREATED = 1, RECORD_RELEASED = 2 };

struct record {
    uint32_t crc; /* CRC-32 of all that follows up to `size`, begun with the journal's seed */
    uint16_t size, name_len;
    uint64_t seq; /* one more than that of the record before */
    uint64_t unique, fh;
    uint64_t parent, ino, gen, file; /* these and the following: CREATED only */
    int64_t time;
    uint32_t kind, device, mode, uid, gid, flags;
};

#define RECORD_ALIGN 8u

/* ---- What Python made ahead, and the directories it lets us make files in ---- */

struct spare {
    uint64_t ino, gen, file, fh;
    uint32_t device;
    int fd;
    bool in_memory;
};

struct granted {
    uint64_t ino; /* 0: no directory */
    struct fuse_attr attr;
    int64_t until; /* on the monotonic clock */
    size_t name_room; /* bytes that a name here may have */
    bool root;
    struct map names; /* hashes of all the names there are */
};

#define MAX_SPARES 256
#define MAX_GRANTED 8

/* Belongs to the thread that holds the GIL, which is the one that reads requests. */
struct small {
    bool on, withheld;
    int journal, wake, clock; /* clock: a file that the kernel stamps */
    uint32_t seed;
    uint64_t seq, served;
    off_t start, used, room;
    uint64_t valid;
    uint32_t valid_nsec;
    struct spare spares[MAX_SPARES];
    size_t spare_head, spare_count;
    struct granted granted[MAX_GRANTED];
    size_t next_granted;
    struct map open; /* fh -> fd of what is in the journal as created and not as released */
};

extern struct small small;

/* _tap_journal.c */
void journal_prepare(void);
bool journal_append(struct record *record, const char *name);

/* _tap_small.c */
struct granted *small_granted(uint64_t ino);
uint64_t small_hash(const char *name, size_t len);
void small_revoke(struct granted *granted);
#pragma GCC visibility pop

#endif
