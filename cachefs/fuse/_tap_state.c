/* Tables in shared memory and a small map within the process.
 *
 * The tables are open-addressed with linear probing. SIGKILL may stop the daemon between any two
 * stores, so a slot counts only once its state word says so: it is filled first and published by
 * one release store, and dropped by one. A dropped slot becomes SLOT_DEAD (probing goes on) until
 * the slot after it is empty, when the run of dead slots before that is emptied from its end: each
 * of these stores leaves a valid table. Moving slots on deletion was rejected: a kill between the
 * two halves of a move shows an entry twice.
 */
#include "_tap.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

_Static_assert(sizeof(struct in_header) == 40, "fuse_in_header");
_Static_assert(sizeof(struct out_header) == 16, "fuse_out_header");
_Static_assert(sizeof(struct init_out) == 64, "fuse_init_out");
_Static_assert(sizeof(struct open_out) == 16, "fuse_open_out");
_Static_assert(sizeof(struct inflight) == 64, "in-flight slot");
_Static_assert(sizeof(struct handle) == 32, "handle slot");
_Static_assert(sizeof(struct backing) == 40, "backing slot");
_Static_assert(offsetof(struct tap_header, takeovers) == 16, "header");
_Static_assert(offsetof(struct tap_header, init_request) == 128, "header");
_Static_assert(offsetof(struct inflight, unique) == offsetof(struct slot, key), "key");
_Static_assert(offsetof(struct handle, fh) == offsetof(struct slot, key), "key");
_Static_assert(offsetof(struct backing, inode) == offsetof(struct slot, key), "key");

#define HEADER_ROOM 4096u
#define INFLIGHT_SLOTS 8192u
#define HANDLE_SLOTS 65536u
#define BACKING_SLOTS 32768u
_Static_assert(HEADER_ROOM + INFLIGHT_SLOTS * sizeof(struct inflight)
               + HANDLE_SLOTS * sizeof(struct handle)
               + BACKING_SLOTS * sizeof(struct backing) <= TAP_STATE_SIZE, "state size");

static uint64_t mix(uint64_t key)
{
    key ^= key >> 30;
    key *= 0xbf58476d1ce4e5b9ull;
    key ^= key >> 27;
    key *= 0x94d049bb133111ebull;
    return key ^ (key >> 31);
}

static struct slot *slot_at(const struct table *table, uint32_t index)
{
    return (struct slot *)(table->base + (size_t)index * table->slot_size);
}

static uint32_t slot_state(const struct slot *slot)
{
    return __atomic_load_n(&slot->state, __ATOMIC_ACQUIRE) & SLOT_STATE;
}

static void set_state(struct slot *slot, uint32_t state)
{
    __atomic_store_n(&slot->state, state, __ATOMIC_RELEASE);
}

static uint32_t home(const struct table *table, uint64_t key)
{
    return (uint32_t)mix(key) & (table->slots - 1);
}

void *table_next(const struct table *table, uint64_t key, uint32_t *position)
{
    while (*position < table->slots) {
        struct slot *slot = slot_at(table, (home(table, key) + *position) & (table->slots - 1));
        uint32_t state = slot_state(slot);

        ++*position;
        if (state == SLOT_EMPTY)
            break;
        if (state >= SLOT_PENDING && slot->key == key)
            return slot;
    }
    *position = table->slots;
    return NULL;
}

void *table_each(const struct table *table, uint32_t *position)
{
    while (*position < table->slots) {
        struct slot *slot = slot_at(table, (*position)++);

        if (slot_state(slot) >= SLOT_PENDING)
            return slot;
    }
    return NULL;
}

void *table_claim(struct table *table, uint64_t key)
{
    if (table->used >= table->slots - table->slots / 8)
        return NULL;
    for (uint32_t i = 0; i < table->slots; i++) {
        struct slot *slot = slot_at(table, (home(table, key) + i) & (table->slots - 1));

        if (slot_state(slot) <= SLOT_DEAD) {
            /* From here to the publication the slot must not look used: its state stays as it is. */
            memset((char *)slot + sizeof(uint32_t), 0, table->slot_size - sizeof(uint32_t));
            slot->key = key;
            return slot;
        }
    }
    return NULL;
}

void table_publish(struct table *table, void *slot, uint32_t state)
{
    if (slot_state(slot) <= SLOT_DEAD)
        table->used++;
    set_state(slot, state);
}

/* A table that was nearly full may be left without one empty slot to end a search. */
static void sweep(const struct table *table)
{
    for (uint32_t i = 0; i < table->slots; i++)
        if (slot_state(slot_at(table, i)) == SLOT_EMPTY)
            return;
    for (uint32_t i = 0; i < table->slots; i++)
        set_state(slot_at(table, i), SLOT_EMPTY);
}

void table_drop(struct table *table, void *slot)
{
    uint32_t mask = table->slots - 1;
    uint32_t index = (uint32_t)(((char *)slot - table->base) / table->slot_size);

    set_state(slot, SLOT_DEAD);
    if (!--table->used)
        sweep(table);
    if (slot_state(slot_at(table, (index + 1) & mask)) != SLOT_EMPTY)
        return;
    for (uint32_t i = 0; i < table->slots; i++, index--) {
        struct slot *dead = slot_at(table, index & mask);

        if (slot_state(dead) != SLOT_DEAD)
            break;
        set_state(dead, SLOT_EMPTY);
    }
}

static void table_attach(struct table *table, char *base, uint32_t slots, uint32_t slot_size)
{
    uint32_t position = 0;

    table->base = base;
    table->slots = slots;
    table->slot_size = slot_size;
    table->used = 0;
    while (table_each(table, &position))
        table->used++;
}

static void attach_tables(struct tap_state *state)
{
    struct tap_header *header = state->header;
    char *base = (char *)header + HEADER_ROOM;

    table_attach(&state->inflight, base, header->inflight_slots, sizeof(struct inflight));
    base += (size_t)header->inflight_slots * sizeof(struct inflight);
    table_attach(&state->handles, base, header->handle_slots, sizeof(struct handle));
    base += (size_t)header->handle_slots * sizeof(struct handle);
    table_attach(&state->backing, base, header->backing_slots, sizeof(struct backing));
}

static void format(struct tap_header *header, size_t size)
{
    uint32_t scale = 1;

    while (scale < 64 && (size_t)scale * 2 * TAP_STATE_SIZE <= size)
        scale *= 2;
    header->magic = TAP_MAGIC;
    header->version = TAP_VERSION;
    header->handle_slots = HANDLE_SLOTS * scale;
    header->backing_slots = BACKING_SLOTS * scale;
    __atomic_store_n(&header->inflight_slots, INFLIGHT_SLOTS * scale, __ATOMIC_RELEASE);
}

static bool power_of_two(uint32_t number)
{
    return number && !(number & (number - 1));
}

static bool fits(const struct tap_header *header, size_t size)
{
    return power_of_two(header->inflight_slots) && power_of_two(header->handle_slots)
        && power_of_two(header->backing_slots)
        && HEADER_ROOM + (size_t)header->inflight_slots * sizeof(struct inflight)
            + (size_t)header->handle_slots * sizeof(struct handle)
            + (size_t)header->backing_slots * sizeof(struct backing) <= size
        && header->init_request_len <= sizeof header->init_request
        && header->init_raw_len <= sizeof header->init_raw
        && header->init_reply_len <= sizeof header->init_reply;
}

static int check(const struct tap_header *header, size_t size, char *why, size_t why_size)
{
    if (header->magic != TAP_MAGIC)
        snprintf(why, why_size, "the takeover state is not cachefs's");
    else if (header->version != TAP_VERSION)
        snprintf(why, why_size, "the takeover state has layout %u, this version knows layout %u",
                 header->version, TAP_VERSION);
    else if (!fits(header, size))
        snprintf(why, why_size, "the takeover state is damaged");
    else
        return 0;
    return -1;
}

static void *map_memory(int fd, size_t *size)
{
    struct stat st;

    *size = TAP_STATE_SIZE;
    if (fd < 0)
        return mmap(NULL, *size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fstat(fd, &st))
        return MAP_FAILED;
    if (st.st_size < (off_t)TAP_STATE_SIZE) {
        errno = EFBIG;
        return MAP_FAILED;
    }
    *size = (size_t)st.st_size;
    return mmap(NULL, *size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

int state_attach(struct tap_state *state, int fd, char *why, size_t why_size)
{
    size_t size;
    void *memory = map_memory(fd, &size);

    if (memory == MAP_FAILED) {
        snprintf(why, why_size, "cannot map the takeover state: %s",
                 errno == EFBIG ? "smaller than 4 MiB" : strerror(errno));
        return -1;
    }
    state->header = memory;
    state->size = size;
    /* The supervisor may have written its own fields; a fresh state has no table sizes yet. */
    if (!state->header->inflight_slots)
        format(state->header, size);
    if (check(state->header, size, why, why_size)) {
        state_detach(state);
        return -1;
    }
    attach_tables(state);
    return 0;
}

void state_detach(struct tap_state *state)
{
    if (state->header)
        munmap(state->header, state->size);
    memset(state, 0, sizeof *state);
}

struct inflight *inflight_find(const struct tap_state *state, uint64_t unique)
{
    uint32_t position = 0;

    return table_next(&state->inflight, unique, &position);
}

struct backing *backing_find(const struct tap_state *state, uint64_t inode)
{
    uint32_t position = 0;

    return table_next(&state->backing, inode, &position);
}

struct handle *handle_find(const struct tap_state *state, uint64_t fh, bool dir)
{
    uint32_t position = 0;
    struct handle *handle;

    while ((handle = table_next(&state->handles, fh, &position)))
        if (dir == !!(handle->state & HANDLE_DIR))
            return handle;
    return NULL;
}

/* ---- map ---- */

static size_t map_find(const struct map *map, uint64_t key)
{
    size_t index = mix(key) & (map->slots - 1);

    while (map->used[index] && map->keys[index] != key)
        index = (index + 1) & (map->slots - 1);
    return index;
}

static bool map_grow(struct map *map)
{
    struct map old = *map, bigger = {.slots = old.slots ? old.slots * 2 : 64};

    bigger.keys = calloc(bigger.slots, sizeof *bigger.keys);
    bigger.values = calloc(bigger.slots, sizeof *bigger.values);
    bigger.used = calloc(bigger.slots, 1);
    if (!bigger.keys || !bigger.values || !bigger.used) {
        map_clear(&bigger);
        return false;
    }
    for (size_t i = 0; i < old.slots; i++)
        if (old.used[i])
            map_put(&bigger, old.keys[i], old.values[i]);
    map_clear(&old);
    *map = bigger;
    return true;
}

bool map_put(struct map *map, uint64_t key, uint64_t value)
{
    size_t index;

    if (map->count * 2 >= map->slots && !map_grow(map))
        return false;
    index = map_find(map, key);
    map->count += !map->used[index];
    map->used[index] = 1;
    map->keys[index] = key;
    map->values[index] = value;
    return true;
}

bool map_get(const struct map *map, uint64_t key, uint64_t *value)
{
    size_t index;

    if (!map->count)
        return false;
    index = map_find(map, key);
    if (!map->used[index])
        return false;
    *value = map->values[index];
    return true;
}

bool map_take(struct map *map, uint64_t key, uint64_t *value)
{
    size_t hole, next, mask = map->slots - 1;

    if (!map_get(map, key, value))
        return false;
    hole = map_find(map, key);
    for (next = (hole + 1) & mask; map->used[next]; next = (next + 1) & mask) {
        size_t wanted = mix(map->keys[next]) & mask;

        if (((next - wanted) & mask) < ((next - hole) & mask))
            continue;
        map->keys[hole] = map->keys[next];
        map->values[hole] = map->values[next];
        hole = next;
    }
    map->used[hole] = 0;
    map->count--;
    return true;
}

void map_clear(struct map *map)
{
    free(map->keys);
    free(map->values);
    free(map->used);
    memset(map, 0, sizeof *map);
}
