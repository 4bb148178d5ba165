"""vLLM uses dpurt without a patch: `DpurtConnector` (a KVConnectorBase_V1) is loaded by configuration only.

    --kv-transfer-config '{"kv_connector": "DpurtConnector", "kv_connector_module_path": "dpurt.engines.vllm.connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"topology": "node.toml", "space": "my-model"}}'

`README.md` beside this file is the page for users. `plan` and `marks` are pure and know no vLLM; `scheduler` and `worker` are
the two sides of the connector, without vLLM's classes; `connector` alone imports vLLM.
"""
