#!/usr/bin/env bash
# Restart vLLM with the settings of the scenario file $SCENARIO.
set -euo pipefail
model=meta-llama/Llama-2-7b-hf
address=127.0.0.1 port=8000
flags="--host $address --port $port"

if [ -f server.pid ]; then  # stop all processes of the last server; kill those that are left after 30 seconds
    session=$(cat server.pid)
    kill -TERM -- "-$session" 2>/dev/null || true
    for _ in $(seq 60); do ps -o stat= -s "$session" | grep -qv Z || break; sleep 0.5; done
    kill -KILL -- "-$session" 2>/dev/null || true
fi
command=$(sim export "$SCENARIO" --to vllm --model "$model")
command=${command/vllm serve /python -m vllm.entrypoints.openai.api_server --model }
setsid bash -c "$command $flags" >> server.log 2>&1 &
echo $! > server.pid
until curl --silent --fail "http://$address:$port/health"; do
    kill -0 $! 2>/dev/null || { echo "vLLM did not start; see server.log" >&2; exit 1; }
    sleep 1
done
