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
# Ends the first push as git ends that writes to a receiver which has ended; meanwhile somebody moves the branch to $THEIRS.
if [ "$3" = push ] && [ -n "$PIPED" ] && mkdir "$PIPED" 2> /dev/null; then
    [ -z "$THEIRS" ] || "$REAL" -C "$SERVER" update-ref refs/heads/baseline/7 "$THEIRS"
    kill -PIPE $$
fi
exec "$REAL" "$@"
