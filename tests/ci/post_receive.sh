#!/bin/sh
# Notes what GitLab would be asked to do, one line for each option of a push.
for at in $(seq 0 $((GIT_PUSH_OPTION_COUNT - 1))); do eval echo "\$GIT_PUSH_OPTION_$at"; done >> "$GIT_DIR/options"
