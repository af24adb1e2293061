/* The journal of small files.
 *
 * A record is one write to a file in memory that outlives this process and its supervisor; it is complete when
 * its checksum says so, and it is there before the reply that it stands for. Records count from the
 * file's start again after each fold; which of them count is told by `seq`: the database knows the
 * last one that is in it. The seed differs from start to start, so nothing older can pass for new.
 */
#include "_tap_small.h"

#include <string.h>
#include <unistd.h>

struct small small = {.journal = -1, .wake = -1, .clock = -1};

static uint32_t crc_table[256];

void journal_prepare(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;

        for (int bit = 0; bit < 8; bit++)
            value = value & 1 ? 0xedb88320u ^ (value >> 1) : value >> 1;
        crc_table[i] = value;
    }
}

/* As zlib.crc32(data, seed). */
static uint32_t crc32_of(uint32_t seed, const unsigned char *data, size_t len)
{
    uint32_t crc = ~seed;

    while (len--)
        crc = crc_table[(crc ^ *data++) & 0xff] ^ (crc >> 8);
    return ~crc;
}

static void wake_up(void)
{
    uint64_t one = 1;

    if (write(small.wake, &one, sizeof one) < 0)
        small.on = false; /* nobody would fold: go on without */
}

bool journal_append(struct record *record, const char *name)
{
    char buffer[sizeof *record + 256 + RECORD_ALIGN] = {0};
    size_t size = sizeof *record + record->name_len;

    size = (size + RECORD_ALIGN - 1) & ~(size_t)(RECORD_ALIGN - 1);
    if (size > sizeof buffer || small.used + (off_t)size > small.room)
        return false;
    record->size = (uint16_t)size;
    record->seq = small.seq + 1;
    memcpy(buffer, record, sizeof *record);
    memcpy(buffer + sizeof *record, name, record->name_len);
    record->crc = crc32_of(small.seed, (unsigned char *)buffer + sizeof record->crc,
                           size - sizeof record->crc);
    memcpy(buffer, &record->crc, sizeof record->crc);
    if (pwrite(small.journal, buffer, size, small.start + small.used) != (ssize_t)size)
        return false;
    if (!small.used)
        wake_up();
    small.used += (off_t)size;
    small.seq++;
    return true;
}
