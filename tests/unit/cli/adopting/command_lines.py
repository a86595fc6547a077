"""Lines with which people start their servers, from public repositories.

Each has the repository and the file that it stands in. Only the lines that say something are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Line:
    """A text that starts a server, and what it is here with the plugin ``vllm``."""

    cited: str
    text: str
    source: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    port: int = 8000
    says: tuple[str, ...] = ()
    """Words of what is told about it."""
    secrets: tuple[str, ...] = ()
    """Texts that must stand nowhere."""
    file: str = "start.sh"


LINES = (
    Line(
        "dagnaputra/nlp, scripts/serve_7b_model.sh",
        "docker run -d --runtime nvidia --gpus all \\\n"
        "    -v ~/.cache/huggingface:/root/.cache/huggingface \\\n"
        "    -p 9898:8000 \\\n    --ipc=host \\\n    vllm/vllm-openai:latest \\\n"
        '    --model Qwen/Qwen2.5-7B-Instruct --max_model_len 1024 --api-key "test_api_key" '
        "--gpu_memory_utilization 0.7\n",
        "Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct",
        {"max_model_len": 1024, "gpu_memory_utilization": 0.7}, port=9898,
        says=("--from-env VLLM_API_KEY",), secrets=("test_api_key",),
    ),
    Line(
        "yandy/dockerapps, vllm/run.ps1",
        "docker run --rm --gpus all -v $PWD/.cache/huggingface:/root/.cache/huggingface -p "
        "8000:8000 --ipc=host vllm/vllm-openai:v0.6.6.post1 --model deepseek-ai/DeepSeek-V3 "
        "--trust-remote-code\n",
        "deepseek-ai/DeepSeek-V3", "DeepSeek-V3", {"trust_remote_code": True},
        says=("it was open without a key",),
    ),
    Line(
        "D-Hank/coding-tasks, src/run.sh",
        'docker run --runtime nvidia --gpus all \\\n    --env "HF_HUB_OFFLINE=1" \\\n'
        "    -p 8000:8000 \\\n    --ipc=host \\\n    vllm/vllm-openai:latest \\\n"
        '    --model Qwen/Qwen2.5-Coder-0.5B-Instruct \\\n    --max_model_len 1024 \\\n'
        '    --api_key "EMPTY"\n',
        "Qwen/Qwen2.5-Coder-0.5B-Instruct", "Qwen2.5-Coder-0.5B-Instruct",
        {"max_model_len": 1024}, says=("HF_HUB_OFFLINE",), secrets=("EMPTY",),
    ),
    Line(
        "HouXianzhoua/llm-inference-platform, scripts/start-tgi-qwen.sh",
        "#!/bin/bash\n# scripts/start-tgi-qwen.sh\n\ndocker run --rm \\\n  --gpus all \\\n"
        "  --shm-size 1g \\\n  -p 8080:80 \\\n"
        "  -v $PWD/models/Qwen2-7B-Instruct-GPTQ-Int4:/data \\\n"
        "  ghcr.io/huggingface/text-generation-inference:latest \\\n  --model-id /data \\\n"
        "  --quantize gptq \\\n  --max-input-length 2048 \\\n  --max-total-tokens 4096 \\\n"
        "  --trust-remote-code\n",
        "./models/Qwen2-7B-Instruct-GPTQ-Int4", "Qwen2-7B-Instruct-GPTQ-Int4",
        {"max_model_len": 4096, "trust_remote_code": True}, port=8080,
        says=("--quantize gptq", "--max-input-length 2048"),
    ),
    Line(
        "awslabs/extending-the-context-length-of-open-source-llms, script/start_falconlite.sh",
        "export model=amazon/FalconLite\nexport num_shard=4\nexport max_input_length=12000 \n"
        "export max_total_tokens=12001\nexport docker_image_id=falcon-lctx:0.9.2 "
        "# ghcr.io/huggingface/text-generation-inference:0.9.2\nexport falconlite_tgi_port=443\n\n"
        "docker run -d --gpus all --env GPTQ_BITS=4 --shm-size 1g -p $falconlite_tgi_port:80 "
        "text-generation-inference:0.9.2 \\\n    --model-id $model --num-shard $num_shard "
        "--max-input-length \\\n    $max_input_length --max-total-tokens $max_total_tokens \\\n"
        "    --max-batch-prefill-tokens $max_total_tokens \\\n    --trust-remote-code \\\n"
        "    --quantize gptq",
        "amazon/FalconLite", "FalconLite",
        {"tensor_parallel_size": 4, "max_model_len": 12001, "trust_remote_code": True}, port=443,
        says=("GPTQ_BITS: no option of the server", "--max-batch-prefill-tokens 12001"),
    ),
    Line(
        "Arihant25/askIIIT, start-tgi.sh",
        "model=google/gemma-3-270m\nvolume=$PWD/models\n\nsource .env\n\n"
        "docker run --gpus all --shm-size 1g -p 8080:80 -v $volume:/models \\\n"
        "    -e HF_TOKEN=$HF_TOKEN \\\n"
        "    ghcr.io/huggingface/text-generation-inference:latest \\\n    --model-id $model \\\n"
        "    --max-total-tokens 8093 \\\n    --max-batch-prefill-tokens 8092\n"
        "    # --max-input-tokens 8092\n",
        "google/gemma-3-270m", "gemma-3-270m", {"max_model_len": 8093}, port=8080,
        says=("a build reads HF_TOKEN",),
    ),
    Line(
        "huggingface/text-generation-inference, in variables of the container",
        "docker run --gpus all -p 8080:80 \\\n  -e MODEL_ID=HuggingFaceH4/starchat-beta \\\n"
        "  -e QUANTIZE=bitsandbytes \\\n  -e NUM_SHARD=1 \\\n  -e MAX_INPUT_LENGTH=1562 \\\n"
        "  -e MAX_TOTAL_TOKENS=2048 \\\n"
        "  ghcr.io/huggingface/text-generation-inference:latest\n",
        "HuggingFaceH4/starchat-beta", "starchat-beta",
        {"quantization": "bitsandbytes", "max_model_len": 2048}, port=8080,
        says=("it asks for nothing",),
    ),
    Line(
        "banjuede/deepseek-test, trt-llm/serve.sh",
        "trtllm-serve /userdata/llms/deepseek-ai/DeepSeek-R1 \\\n            --backend pytorch \\\n"
        "            --tp_size 8 \\\n            --pp_size 1 \\\n            --ep_size 4 \\\n"
        "            --max_batch_size 161 \\\n            --max_num_tokens 1160 \\\n"
        "            --kv_cache_free_gpu_memory_fraction 0.8 \\\n            --trust_remote_code\n",
        "/userdata/llms/deepseek-ai/DeepSeek-R1", "DeepSeek-R1",
        {"tensor_parallel_size": 8, "max_num_seqs": 161, "gpu_memory_utilization": 0.8,
         "trust_remote_code": True},
        says=("--ep_size 4", "--max_num_tokens 1160"),
    ),
    Line(
        "phatvo9/benchmark_gpu, tuning/tensorrt_llm/deepseek-r1/mtp/start_config1.sh",
        "#!/bin/bash\n\n\ntrtllm-serve nvidia/DeepSeek-R1-FP4 \\\n"
        "    --host 0.0.0.0 --port 26666 --backend pytorch \\\n    --tp_size 8 --ep_size 2 \\\n"
        "    --trust_remote_code \\\n    --kv_cache_free_gpu_memory_fraction 0.7 "
        "--extra_llm_api_options ./tuning/tensorrt_llm/deepseek-r1/mtp/trt_bench_mtp.yaml\n",
        "nvidia/DeepSeek-R1-FP4", "DeepSeek-R1-FP4",
        {"tensor_parallel_size": 8, "gpu_memory_utilization": 0.7, "trust_remote_code": True},
        port=26666, says=("it is another file and was not read",),
    ),
    Line(
        "taco-project/FlexKV, examples/trtllm_adaption/launch.sh",
        "MODEL_PATH=/cfs_zhongwei/models/deepseek-ai/DeepSeek-V3.1-W4AFP8-MTP-TRTLLM\n"
        "MAX_SEQ_LEN=155648\nTP_SIZE=8\nEP_SIZE=$TP_SIZE\n\ntrtllm-serve serve $MODEL_PATH \\\n"
        "    --host 0.0.0.0 \\\n    --port 6000 \\\n    --backend pytorch \\\n"
        "    --tp_size $TP_SIZE \\\n    --ep_size $EP_SIZE \\\n"
        "    --max_seq_len $MAX_SEQ_LEN 2>&1 | tee logs/$TIMESTAMP.log \n",
        "/cfs_zhongwei/models/deepseek-ai/DeepSeek-V3.1-W4AFP8-MTP-TRTLLM",
        "DeepSeek-V3.1-W4AFP8-MTP-TRTLLM",
        {"tensor_parallel_size": 8, "max_model_len": 155648}, port=6000, says=("--ep_size 8",),
    ),
    Line(
        "thr3a/llama-cpp-docker-compose, README.md",
        "lora:\n  image: ghcr.io/ggerganov/llama.cpp:server-cuda\n  volumes:\n"
        "    - ./cache:/root/.cache\n    - ./:/app\n  ports:\n    - \"8000:8000\"\n"
        "  entrypoint: ''\n  environment:\n    TZ: Asia/Tokyo\n  command: >\n    /llama-server\n"
        "    --host 0.0.0.0\n    --port 8000\n    --hf-repo grapevine-AI/gemma-2-2b-jpn-it-gguf\n"
        "    --hf-file gemma-2-2B-jpn-it-Q8_0.gguf\n    --threads 8\n    --n-gpu-layers 99\n"
        "    --ctx-size 4096\n    -a gpt-4o-mini\n    --lora /app/zunda-LoRA.gguf\n",
        "grapevine-AI/gemma-2-2b-jpn-it-gguf:gemma-2-2B-jpn-it-Q8_0.gguf", "gpt-4o-mini",
        {"max_model_len": 4096}, says=("compose.yaml:21: --lora /app/zunda-LoRA.gguf",),
        file="compose.yaml",
    ),
    Line(
        "a compose file of vLLM with defaults for what .env may set",
        "version: '2.3'\n\nservices:\n  vllm:\n    image: vllm/vllm-openai:latest\n"
        "    volumes:\n      - ${HF_HOME:-~/.cache/huggingface}:/root/.cache/huggingface\n"
        "    ports:\n      - \"8000:8000\"\n    environment:\n"
        "      - HUGGING_FACE_HUB_TOKEN=${HUGGING_FACE_HUB_TOKEN}\n"
        "    command: --model ${MODEL:-google/gemma-2-9b-it} --gpu-memory-utilization "
        "${GPU_MEMORY_UTILIZATION:-1.0} --tensor-parallel-size ${TENSOR_PARALLEL_SIZE:-4} "
        "--host 0.0.0.0 --port 8000\n    ipc: host\n",
        "google/gemma-2-9b-it", "gemma-2-9b-it",
        {"gpu_memory_utilization": 1.0, "tensor_parallel_size": 4},
        says=("a build reads HF_TOKEN",), file="compose.yaml",
    ),
    Line(
        "a Deployment of vLLM for tools",
        "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: vllm\nspec:\n  template:\n"
        "    spec:\n      containers:\n      - name: vllm\n        image: vllm/vllm-openai:v0.9.0\n"
        "        args:\n        - \"--model\"\n        - meta-llama/Llama-3.2-3B-Instruct\n"
        "        - \"--enable-auto-tool-choice\"\n        - \"--chat-template\"\n"
        "        - \"/vllm-workspace/examples/tool_chat_template_llama3.2_json.jinja\"\n"
        "        - \"--tool-call-parser\"\n        - llama3_json\n        - \"--port\"\n"
        "        - '8000'\n        - \"--dtype\"\n        - half\n        - \"--max-model-len\"\n"
        "        - '8192'\n        env:\n        - name: VLLM_PORT\n          value: '8000'\n"
        "        - name: HUGGING_FACE_HUB_TOKEN\n          valueFrom:\n            secretKeyRef:\n"
        "              name: hf-token-secret\n",
        "meta-llama/Llama-3.2-3B-Instruct", "Llama-3.2-3B-Instruct",
        {"dtype": "float16", "max_model_len": 8192},
        says=("chat_template.jinja", "a build reads HF_TOKEN"), file="deployment.yaml",
    ),
    Line(
        "tchangkiat/aws-cdk-stacks, scripts/eks/install-vllm.sh",
        "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: vllm-meta-llama-server\nspec:\n"
        "  replicas: 1\n  template:\n    spec:\n      containers:\n      - name: vllm-meta-llama\n"
        "        command: [\"/bin/sh\", \"-c\"]\n        args: [\n"
        "          \"vllm serve meta-llama/Llama-3.2-1B-Instruct --dtype=float16\"\n        ]\n",
        "meta-llama/Llama-3.2-1B-Instruct", "Llama-3.2-1B-Instruct", {"dtype": "float16"},
        file="deployment.yaml",
    ),
    Line(
        "kserve/website, docs/modelserving/v1beta1/llm/huggingface/README.md",
        "apiVersion: serving.kserve.io/v1beta1\nkind: InferenceService\nmetadata:\n"
        "  name: huggingface-llama3\nspec:\n  predictor:\n    model:\n      modelFormat:\n"
        "        name: huggingface\n      args:\n      - --model_name=llama3\n"
        "      - --model_id=meta-llama/meta-llama-3-8b-instruct\n      resources:\n"
        "        limits:\n          cpu: \"6\"\n          nvidia.com/gpu: \"1\"\n",
        "meta-llama/meta-llama-3-8b-instruct", "llama3", port=8080, file="isvc.yaml",
    ),
    Line(
        "kserve/kserve, docs/samples/storage/hf/hf_isvc.yaml",
        "apiVersion: serving.kserve.io/v1beta1\nkind: InferenceService\nmetadata:\n"
        "  name: huggingface-llama2\nspec:\n  predictor:\n    model:\n      modelFormat:\n"
        "        name: huggingface\n      args:\n      - --model_name=llama2\n"
        "      - --backend=huggingface\n      storageUri: hf://meta-llama/Llama-2-7b-chat-hf\n",
        "meta-llama/Llama-2-7b-chat-hf", "llama2", port=8080, file="isvc.yaml",
    ),
    Line(
        "ray-project/ray, doc/source/serve/llm",
        "applications:\n- args:\n    llm_configs:\n    - model_loading_config:\n"
        "        model_id: qwen-0.5b\n        model_source: Qwen/Qwen2.5-0.5B-Instruct\n"
        "      accelerator_type: A10G\n      deployment_config:\n        autoscaling_config:\n"
        "          min_replicas: 1\n          max_replicas: 2\n      engine_kwargs:\n"
        "        tensor_parallel_size: 2\n        enable_prefix_caching: true\n"
        "        hf_token: hf_abcdefghijkl\n"
        "  import_path: ray.serve.llm:build_openai_app\n  name: llm_app\n  route_prefix: \"/\"\n",
        "Qwen/Qwen2.5-0.5B-Instruct", "qwen-0.5b",
        {"tensor_parallel_size": 2, "enable_prefix_caching": "true"},
        says=("accelerator_type A10G", "a secret, not written"), secrets=("hf_abcdefghijkl",),
        file="serve.yaml",
    ),
    Line(
        "EvanAramayo/footyllm-EvanAramayo, modelfile.md",
        "FROM llama3\n\nPARAMETER temperature 0.7\nPARAMETER num_ctx 4096\n\n"
        "SYSTEM You are FootyFacts, a world-class soccer knowledge assistant.\n\n"
        'TEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}"""\n',
        "llama3", "llama3", {"max_model_len": 4096}, port=11434,
        says=("it is a name in Ollama's registry", "temperature of each request",
              "the chat template of the model itself"),
        file="Modelfile",
    ),
    Line(
        "xiz2002/Practice_NestedCompose, apps/ollama/models",
        "FROM hf.co/Qwen/Qwen3-VL-8B-Instruct-GGUF:Q4_K_M\n\nPARAMETER temperature 1\n"
        "PARAMETER num_ctx 4096\nPARAMETER num_predict 128\n\n"
        'SYSTEM """You are an assistant designed for question-answering tasks.\nBe concise."""\n',
        "Qwen/Qwen3-VL-8B-Instruct-GGUF", "Qwen3-VL-8B-Instruct-GGUF",
        {"max_model_len": 4096, "max_tokens": 128}, port=11434,
        says=("name the GGUF file of Q4_K_M",), file="Modelfile",
    ),
    Line(
        "maddyrucos/pizzeria_agent, llm/run_model.sh",
        "#!/usr/bin/env bash\nset -euo pipefail\n\n"
        "python3 -m vllm.entrypoints.openai.api_server \\\n  --model Qwen/Qwen2.5-3B-Instruct \\\n"
        "  --dtype auto \\\n  --max-model-len 4096 \\\n  --gpu-memory-utilization 0.85 \\\n"
        "  --enable-auto-tool-choice \\\n  --tool-call-parser hermes\n",
        "Qwen/Qwen2.5-3B-Instruct", "Qwen2.5-3B-Instruct",
        {"max_model_len": 4096, "gpu_memory_utilization": 0.85}, says=("it asks for nothing",),
    ),
    Line(
        "southfreebird/vllm, run_vllm.sh",
        "vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct \\\n"
        "          --served-model-name meta-llama/Meta-Llama-3.1-8B-Instruct-fast \\\n"
        "          --trust-remote-code \\\n          --disable-log-requests \\\n"
        "          --tensor-parallel-size 2 \\\n"
        "          --speculative-config '{\"model\": \"./mlp_based_lk/\", "
        "\"num_speculative_tokens\": 3, \"method\": \"mlp_speculator\"}'\n"
        "          # --speculative-config '{\"method\": \"eagle\"}'\n",
        "meta-llama/Meta-Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B-Instruct-fast",
        {"trust_remote_code": True, "tensor_parallel_size": 2,
         "speculative_config": '{"model": "./mlp_based_lk/", "num_speculative_tokens": 3, '
         '"method": "mlp_speculator"}'},
        says=("--disable-log-requests",),
    ),
    Line(
        "ohjoonhee/lmms-eval, scripts/qwen_vllm_serve.sh",
        "#!/bin/bash\n\nvllm serve Qwen/Qwen3-VL-2B-Instruct \\\n    --enable-auto-tool-choice \\\n"
        "    --tool-call-parser hermes \\\n    --max-model-len 131072 \\\n"
        "    # --quantization fp8\n    # --reasoning-parser deepseek_r1 \\",
        "Qwen/Qwen3-VL-2B-Instruct", "Qwen3-VL-2B-Instruct", {"max_model_len": 131072},
    ),
    Line(
        "alan-turing-institute/t0-1, scripts/spark/serve_gpt-oss_with_tools.sh",
        "vllm serve openai/gpt-oss-20b \\\n--seed 42 \\\n--generation-config vllm \\\n"
        "--port 8020 \\\n--tensor-parallel-size 1 \\\n--hf-overrides '{\"rope-scaling\": "
        "{\"factor\":4, \"rope_type\":\"yarn\"}}' \\\n--tool-call-parser openai \\\n"
        "--gpu-memory-utilization 0.5\n",
        "openai/gpt-oss-20b", "gpt-oss-20b",
        {"gpu_memory_utilization": 0.5, "engine_args": '{"seed": 42, "hf_overrides": '
         '{"rope-scaling": {"factor": 4, "rope_type": "yarn"}}}'},
        port=8020, says=("--generation-config vllm",),
    ),
    Line(
        "rrrepos/rx-labs, scripts/run-model.sh",
        'MODEL="meta-llama/Meta-Llama-3-8B-Instruct" \n\ndocker run --runtime nvidia --gpus all '
        '\\\n    --env-file "docker.env" \\\n    -p 8000:8000 \\\n    --ipc=host \\\n'
        "    vllm/vllm-openai:latest \\\n    --model $MODEL\n",
        "meta-llama/Meta-Llama-3-8B-Instruct", "Meta-Llama-3-8B-Instruct",
        says=("--env-file docker.env: it cannot be read here",),
    ),
    Line(
        "koyeb/example-vllm, Dockerfile",
        "FROM vllm/vllm-openai:latest\n\nENTRYPOINT python3 -m vllm.entrypoints.openai.api_server "
        "\\\n    --model ${MODEL_NAME:-meta-llama/Meta-Llama-3.1-8B-Instruct}\n",
        "meta-llama/Meta-Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B-Instruct", file="Dockerfile",
    ),
    Line(
        "lum7671/Scripts, run_llvm_coder.zsh",
        "#!/usr/bin/env zsh\n\nllama-server \\\n    -hf ggml-org/Qwen2.5-Coder-3B-Q8_0-GGUF \\\n"
        "    --port 8012 -ngl 99 -fa -ub 1024 -b 1024 -dt 0.1 \\\n"
        "    --ctx-size 0 --cache-reuse 256 &\n",
        "ggml-org/Qwen2.5-Coder-3B-Q8_0-GGUF", "Qwen2.5-Coder-3B-Q8_0-GGUF", port=8012,
        says=("-ngl 99", "--ctx-size 0: it asks for nothing"),
    ),
    Line(
        "vllm-project/production-stack, tutorials/assets/values-02-basic-config.yaml",
        'servingEngineSpec:\n  runtimeClassName: ""\n  modelSpec:\n  - name: "llama3"\n'
        '    repository: "vllm/vllm-openai"\n    tag: "latest"\n'
        '    modelURL: "meta-llama/Llama-3.1-8B-Instruct"\n    replicaCount: 1\n    requestGPU: 1\n'
        '    vllmConfig:\n      enableChunkedPrefill: false\n      enablePrefixCaching: false\n'
        '      maxModelLen: 4096\n      dtype: "bfloat16"\n'
        '      extraArgs: ["--disable-log-requests", "--gpu-memory-utilization", "0.8"]\n'
        "    hf_token: <YOUR HF TOKEN>\n",
        "meta-llama/Llama-3.1-8B-Instruct", "llama3",
        {"enable_chunked_prefill": "false", "enable_prefix_caching": "false",
         "max_model_len": 4096, "dtype": "bfloat16", "gpu_memory_utilization": 0.8},
        says=("a build reads HF_TOKEN",), secrets=("YOUR HF TOKEN",), file="values.yaml",
    ),
    Line(
        "vllm-project/production-stack, tutorials/assets/values-25-v100-multi-gpu-tp2.yaml",
        'servingEngineSpec:\n  strategy:\n    type: Recreate\n  modelSpec:\n  - name: "qwen7b"\n'
        '    repository: "vllm/vllm-openai"\n    modelURL: "Qwen/Qwen2.5-7B-Instruct"\n'
        "    replicaCount: 1\n    pvcAccessMode:\n      - ReadWriteOnce\n    vllmConfig:\n"
        '      dtype: "half"\n      v0: "1"\n      tensorParallelSize: 2\n'
        '      maxModelLen: 8192\n      extraArgs:\n        - "--enforce-eager"\n    env:\n'
        '      - name: VLLM_ENABLE_CUDA_COMPATIBILITY\n        value: "1"\n    shmSize: "4Gi"\n',
        "Qwen/Qwen2.5-7B-Instruct", "qwen7b",
        {"dtype": "float16", "tensor_parallel_size": 2, "max_model_len": 8192,
         "enforce_eager": True},
        says=("shmSize 4Gi", "VLLM_ENABLE_CUDA_COMPATIBILITY"), file="values.yaml",
    ),
)  # fmt: skip
