"""Learn from images without labels: masked autoencoding (arXiv 2111.06377) or distillation.

    python recipes/pretrain.py --dataset_name unlabelled --preset tiny-patch16-224 \\
        --output_dir runs/pretrained
    python recipes/train.py --dataset_name labelled --model_name_or_path runs/pretrained/model \\
        --output_dir runs/labelled
    python recipes/pretrain.py --config pretrain-fashion-mnist
    python recipes/pretrain.py --dataset_name unlabelled --preset tiny-patch16-224 \\
        --teacher_name_or_path facebook/dinov2-base --output_dir runs/distilled

The first command pre-trains an encoder; the second fine-tunes it on labelled images. Any folder of
images will do; all else works as in train.py (see its --help). If the images have labels, they are
not learned: each evaluation reports the k-NN accuracy of the encoder's features. model/ loads as
`HFViTForPreTraining`, and without the decoder as the other classes; its card shows a few images,
their visible patches and the reconstructions.
"""

if __name__ == "__main__":  # the imports take seconds
    from command_line import training_arguments

    from hf_vit.training.pretrain_arguments import PretrainArguments

    ARGUMENTS = training_arguments(__doc__, PretrainArguments)

    from hf_vit.training.pretraining import PreTraining
    from hf_vit.training.train import train_as_script

    train_as_script(ARGUMENTS, PreTraining)
