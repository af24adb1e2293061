/* Files that are still being fetched: which bytes of them are in the cache file already.
 *
 * Python tells with each read that comes to it. What has arrived is read without it from then on
 * (_tap_data.c), but for the first block of each chunk, or of several: Python has to see how far
 * readers have come, to fetch ahead of them.
 *
 * Lock held, all of it. The descriptors are Python's: it takes a file back before it closes one.
 */
#include "_tap.h"

#include <stdlib.h>
#include <string.h>

#define BLOCK ARRIVAL_BLOCK /* what the kernel reads at a time, at least, when it reads ahead */

struct arrived {
    uint64_t reader, size; /* reader: as in tap.readers */
    size_t blocks;
    uint8_t there[]; /* one for each block */
};

static struct map files; /* inode -> struct arrived */

static struct arrived *find(uint64_t ino)
{
    uint64_t value;

    return map_get(&files, ino, &value) ? (struct arrived *)(uintptr_t)value : NULL;
}

bool tap_has_arrived(uint64_t ino, const struct read_in *in, uint64_t *reader)
{
    struct arrived *file = find(ino);
    uint64_t end = in->offset + in->size;
    size_t first = in->offset / BLOCK;

    if (!file || !in->size || in->offset >= file->size)
        return false;
    if (end > file->size)
        end = file->size;
    *reader = file->reader;
    return !memchr(file->there + first, 0, (end - 1) / BLOCK + 1 - first);
}

static struct arrived *add(uint64_t ino, uint64_t reader, uint64_t size)
{
    size_t blocks = size / BLOCK + 1;
    struct arrived *file = calloc(1, sizeof *file + blocks);

    if (!file)
        return NULL;
    *file = (struct arrived){.reader = reader, .size = size, .blocks = blocks};
    if (!map_put(&files, ino, (uint64_t)(uintptr_t)file)) {
        free(file);
        return NULL;
    }
    return file;
}

/* Blocks that are there as a whole, the last one up to the end of the file; but for the first of
 * each `chunk` bytes. */
static void mark(struct arrived *file, uint64_t start, uint64_t end, uint64_t chunk)
{
    size_t first = (start + BLOCK - 1) / BLOCK, step = chunk / BLOCK;
    size_t last = end >= file->size ? file->blocks : end / BLOCK;

    if (first < last)
        memset(file->there + first, 1, last - first);
    for (size_t i = first + (step - first % step) % step; i < last; i += step)
        file->there[i] = 0;
}

bool tap_note_arrived(uint64_t ino, uint64_t reader, uint64_t size, const struct arrival *what)
{
    struct arrived *file = find(ino);

    if (!file)
        file = add(ino, reader, size);
    if (file && file->size == size)
        mark(file, what->start, what->end, what->chunk);
    return file != NULL;
}

void tap_take_back(uint64_t ino)
{
    uint64_t value;

    if (map_take(&files, ino, &value))
        free((void *)(uintptr_t)value);
}
