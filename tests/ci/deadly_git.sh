#!/bin/sh
# Ends its parent by SIGKILL at call number $AT, before or after it does what was asked, and counts calls.
echo "$3" >> "$COUNTED"
if [ "$(wc -l < "$COUNTED")" -eq "$AT" ]; then
    [ "$WHEN" = after ] || kill -9 $PPID
    "$REAL" "$@"
    [ "$WHEN" = during ] || kill -9 $PPID
    : > "$ENDED"
    exit 1
fi
exec "$REAL" "$@"
