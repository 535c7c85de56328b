#!/usr/bin/env bash
# A session's life over plain HTTP, against a running server: `session-runtime serve`.
#
#     ./curl.sh [http://127.0.0.1:8080]
set -euo pipefail

base=${1:-http://127.0.0.1:8080}
json='content-type: application/json'
id=curl-example

call() {
    local method=$1 path=$2 body=${3:-}
    echo "== $method $path"
    if [ -n "$body" ]; then
        curl --silent --show-error --no-buffer --request "$method" --header "$json" --data "$body" "$base$path"
    else
        curl --silent --show-error --no-buffer --request "$method" "$base$path"
    fi
    echo
}

call POST /v1/sessions '{"id": "'$id'", "title": "from the shell", "instructions": "You answer briefly."}'
call POST /v1/sessions/$id/turns '{"input": "Name one city in Italy.", "max_tokens": 32, "stream": true}'
call GET "/v1/sessions/$id/events?after=0&limit=3"
call POST /v1/sessions/$id/kv/evict '{}'
call GET /v1/sessions/$id/kv
call POST /v1/sessions/$id/turns '{"input": "And one in Spain.", "max_tokens": 32}'
call GET /v1/sessions/$id/kv/transitions
call DELETE /v1/sessions/$id
