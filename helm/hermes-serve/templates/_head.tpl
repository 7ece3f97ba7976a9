{{/* The head: Ray's GCS, its dashboard, Serve's controller. With autoscaling, KubeRay adds the autoscaler's container.
     Only that container mounts the token for the Kubernetes API, because Ray runs any code that it is sent. */}}
{{- define "hermes.headSpec" -}}
{{- $pod := dict "root" . "component" "head" "group" .Values.head -}}
serviceAccountName: {{ include "hermes.account" (list . "head") }}
# Serve's and Ray's state is in Redis and no client is connected, so there is nothing to wait for. A new head starts only
# when this one has gone.
terminationGracePeriodSeconds: 10
initContainers:
  {{- include "hermes.checkRedis" $pod | nindent 2 }}
containers:
  - name: ray-head
    image: {{ include "hermes.rayImage" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    env:
      {{- include "hermes.rayEnvironment" $pod | nindent 6 }}
    ports: # KubeRay creates Services for them by these names
      - name: gcs-server
        containerPort: 6379
      - name: dashboard
        containerPort: 8265
      - name: serve
        containerPort: 8000
      - name: metrics
        containerPort: 8080
      - name: agent
        containerPort: 52365
      - name: as-metrics
        containerPort: 44217
      - name: dash-metrics
        containerPort: 44227
    {{- include "hermes.resources" (dict "root" . "cpus" .Values.head.cpus "memory" .Values.head.memory) | nindent 4 }}
    {{- include "hermes.rayletProbes" . | nindent 4 }}
    readinessProbe:
      httpGet: {path: /api/gcs_healthz, port: dashboard}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 6
    volumeMounts:
      {{- include "hermes.rayMounts" $pod | nindent 6 }}
volumes:
  {{- include "hermes.rayVolumes" $pod | nindent 2 }}
  {{- if include "hermes.autoscaling" . | fromJson }}
  - name: kubernetes-api # what Kubernetes would otherwise mount into every container
    projected:
      sources:
        - serviceAccountToken:
            path: token
            expirationSeconds: 3607
        - configMap:
            name: kube-root-ca.crt
            items:
              - key: ca.crt
                path: ca.crt
        - downwardAPI:
            items:
              - path: namespace
                fieldRef:
                  fieldPath: metadata.namespace
  {{- end }}
{{- end }}

{{/* The container that KubeRay adds to the head. */}}
{{- define "hermes.autoscaler" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
# The first process of a container ignores SIGTERM unless it handles it, and Ray's autoscaler does not: the next head
# would wait for the whole grace period. So a shell is first, and its end ends the autoscaler. (KubeRay's own command
# is the same `ray kuberay-autoscaler`, and it sets both variables.)
command: [/bin/bash, -c, --]
args:
  - >-
    trap 'exit 143' TERM;
    ray kuberay-autoscaler --cluster-name "$RAY_CLUSTER_NAME" --cluster-namespace "$RAY_CLUSTER_NAMESPACE" &
    wait $!
{{ include "hermes.resources" (dict "root" . "cpus" .Values.autoscaler.cpus "memory" .Values.autoscaler.memory) }}
volumeMounts:
  - name: tmp # shared with the head, whose dashboard shows the autoscaler's logs
    mountPath: /tmp
  - name: kubernetes-api
    mountPath: /var/run/secrets/kubernetes.io/serviceaccount
    readOnly: true
env:
  - name: NVIDIA_VISIBLE_DEVICES
    value: void
{{- end }}
