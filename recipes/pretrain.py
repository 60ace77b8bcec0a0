"""Learn from images without labels: masked autoencoding (arXiv 2111.06377), or a larger model's
features.

    python recipes/pretrain.py --dataset_name photos --preset tiny-patch16-224 \\
        --output_dir runs/pretrained
    python recipes/train.py --dataset_name photos --model_name_or_path runs/pretrained/model \\
        --output_dir runs/photos
    python recipes/pretrain.py --config pretrain-fashion-mnist
    python recipes/pretrain.py --dataset_name photos --preset tiny-patch16-224 \\
        --teacher_name_or_path facebook/dinov2-base --output_dir runs/distilled

The first command pre-trains on all photos; the second fine-tunes its encoder on the photos that
have labels.

Any folder of images will do. Data, flags, resuming, processes, run folder and exit codes are
those of train.py (see its --help), except flags about labels. If the images have labels, each
evaluation also reports the k-NN accuracy of the encoder's features. model/ loads as
`HFViTForPreTraining`, `HFViTModel`, `HFViTForImageClassification` and `HFViTBackbone`; its card
shows a few images, their visible patches and the reconstructions.
"""

if __name__ == "__main__":  # the imports take seconds
    from command_line import training_arguments

    from hf_vit.training.pretrain_arguments import PretrainArguments

    ARGUMENTS = training_arguments(__doc__, PretrainArguments)

    from hf_vit.training.pretraining import PreTraining
    from hf_vit.training.train import train_as_script

    train_as_script(ARGUMENTS, PreTraining)
