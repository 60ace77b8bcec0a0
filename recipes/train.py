# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_vit[recipes]"]
# tool.uv.sources.hf_vit = { path = "..", editable = true }
# ///
"""Train or fine-tune a Vision Transformer on any image data set.

    python recipes/train.py --config demo
    python recipes/train.py --dataset_name photos --output_dir runs/photos \\
        --model_name_or_path google/vit-base-patch16-224-in21k
    python recipes/train.py --dataset_name photos --preset tiny-patch16-224 \\
        --output_dir runs/scratch
    accelerate launch --config_file recipes/accelerate/ddp.yaml --num_processes 2 \\
        recipes/train.py --config cifar10

--config names a preset of recipes/configs or a YAML file of flags; flags override it. --dry_run
prints the data and the plan (steps, learning rates, evaluations), then exits. The same command
resumes a killed run and ends with the same weights. The run folder holds

    config.yaml            the plan and all flags; `--config FILE` repeats the run
    metrics.jsonl          a line per log step and per evaluation
    checkpoints/           step-N: to continue from; best-N: the best weights so far
    model/                 weights, config, image processor, code and card, for `from_pretrained`
    last/                  the last weights, if model/ holds those of an earlier evaluation
    results.json           metrics with intervals, scores per class, times, versions, data
    confusion_matrix.csv   a row per true class, a column per predicted class
    predictions.csv        a row per evaluated image: file, label, predicted class, confidence
    samples.safetensors    a few evaluated images and the most confident mistakes, with logits

Exit codes: 0 finished, 75 stopped by SIGTERM, SIGINT or SIGUSR1 and ready to continue, 1 error,
2 wrong flag. `accelerate launch` exits with 1 instead of 75 and 2.
"""

if __name__ == "__main__":  # the imports take seconds
    from command_line import training_arguments

    from hf_vit.training.arguments import TrainArguments

    ARGUMENTS = training_arguments(__doc__, TrainArguments)

    from hf_vit.training.train import train_as_script

    train_as_script(ARGUMENTS)
