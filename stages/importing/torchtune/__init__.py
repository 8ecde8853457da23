"""torchtune's YAML recipes for full_finetune and lora_finetune, as of version 0.6."""
